"""What a system has to do in one measurement, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from fedel.bench.proc import Watch
from fedel.bench.workloads import Workload


@dataclass(frozen=True)
class Load:
    """What a system has to do."""

    workload: Workload
    num_clients: int
    num_rounds: int
    seconds: float
    """It is ended after this time."""


@dataclass(frozen=True)
class Outcome:
    watch: Watch
    bytes_up: float | None = None
    """Bytes of tensors that clients sent per round, where the system counts them."""
    bytes_down: float | None = None
    close_seconds: float | None = None
    """From the last receipt to the new version, where the system says so."""
