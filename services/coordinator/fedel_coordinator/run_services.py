"""What the runs of one coordinator share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedel.plugins import Allowed
from fedel.telemetry import CoordinatorMetrics
from fedel_coordinator.fleet import Fleet
from fedel_coordinator.run_directory import RunDirectory
from fedel_coordinator.sessions import Sessions
from fedel_coordinator.shards import Shards
from fedel_coordinator.store import Store
from fedel_coordinator.traces import Traces


def steady_clock() -> Callable[[], float]:
    """Unix seconds that never jump: deadlines must not move when somebody sets the machine's clock."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


class RunLimits(Protocol):
    """The coordinator's settings that runs look at."""

    @property
    def max_clients(self) -> int: ...

    @property
    def forget_seconds(self) -> float: ...

    @property
    def code(self) -> Allowed: ...


@dataclass(frozen=True)
class RunServices:
    """What the runs of one coordinator share."""

    store: Store
    sessions: Sessions
    shards: Shards
    metrics: CoordinatorMetrics
    clock: Callable[[], float]
    """Unix seconds."""
    limits: RunLimits
    fleet: Fleet
    runs_dir: Path | None = None
    traces: Traces | None = None
    phase_changed: Callable[[str], None] = lambda _: None
    """Called with the name of a run."""

    def directory(self, run: str) -> RunDirectory | None:
        return RunDirectory(self.runs_dir / run) if self.runs_dir else None
