"""The virtual clock: how long a client's round takes (algorithms 19.3, A3, A30).

Seconds come from timing profiles. Two clocks run: ``backward`` counts only the backward pass, as the paper's
simulation does, ``train`` the whole step. One of them, the scope of the run, decides; both are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedel.core.timing import fits
from fedel.types import Report


@dataclass(frozen=True)
class Spent:
    """Virtual seconds of one client in one round."""

    backward_seconds: float
    train_seconds: float
    network_seconds: float = 0.0

    def training(self, scope: str) -> float:
        return self.backward_seconds if scope == "backward" else self.train_seconds

    def total(self, scope: str) -> float:
        return self.training(scope) + self.network_seconds


def spent(report: Report, drift: float = 1.0, network_seconds: float = 0.0) -> Spent:
    """Steps as the strategy predicts them, and the probe, on a device ``drift`` times slower than it was."""

    backward, train = (drift * report.seconds(scope) for scope in ("backward", "train"))
    return Spent(backward, train, network_seconds)


def in_time(seconds: float, deadline_seconds: float) -> bool:
    return fits(seconds, deadline_seconds)
