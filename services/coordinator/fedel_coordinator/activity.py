"""What a client is doing in the open round, for people who watch; the round engine does not need it."""

from __future__ import annotations

from dataclasses import dataclass

from fedel.roles.recorder import counted_seconds
from fedel.roles.run_state import TaskResult
from fedel.types import Task, Window
from fedel.v1 import coordinator_pb2 as pb


@dataclass
class Activity:
    phase: str = "idle"
    window: Window | None = None
    resets: int = 0
    rounds_held: int = 0
    train_seconds: float = 0.0
    counted_seconds: float = 0.0
    """Seconds that count against T_th."""
    budget_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    def progressed(self, progress: pb.TaskProgress) -> None:
        self.phase = progress.phase
        if progress.window.front_block:
            window = progress.window
            self.window = Window(window.end_block, window.front_block)
            self.resets, self.rounds_held = window.resets, window.rounds_held

    def done(self, result: TaskResult, task: Task | None, scope: str) -> None:
        report = result.report
        self.phase = "done"
        self.window, self.resets, self.rounds_held = report.window, report.resets, report.rounds_held
        self.train_seconds = report.train_seconds
        self.counted_seconds = counted_seconds(scope, report.train_seconds, result.phases)
        self.budget_seconds = task.round_seconds(report.num_samples) if task else 0.0
        self.bytes_up, self.bytes_down = result.bytes_up, result.bytes_down
