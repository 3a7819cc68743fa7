"""Errors of the aggregator's own, and how calls end with them."""

from __future__ import annotations

from pathlib import Path

import grpc
from fedel_services.errors import Status, Statuses

from fedel.errors import ServiceError

MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError)
"""What reading JSON or numbers of a damaged file can raise."""


class Damaged(ServiceError):
    """A file is missing, cut off or changed: its run cannot go on before somebody mends that."""


class DamagedUpdate(Damaged):
    """The damaged file is one client's update: the run can go on without it."""


def damaged(kind: str, path: Path, detail: object, advice: str = "restore it from a copy") -> Damaged:
    return Damaged(f"{kind} is damaged: {path}, {detail}; {advice}")


def damaged_update(path: Path, detail: object) -> DamagedUpdate:
    advice = "restore it from a copy, or delete it to continue without this client"
    return DamagedUpdate(f"update is damaged: {path}, {detail}; {advice}")


STATUSES: Statuses = {
    # Callers try again: the file may be restored while they wait.
    Damaged: Status(grpc.StatusCode.UNAVAILABLE, "damaged"),
}
