"""The client's part of a round: take up where the last accepted round left off, fit, stage the memory."""

from __future__ import annotations

from typing import Protocol

from fedel.types import Memory, Strategy, Task, Tensors, Trainer, Update


class Memories(Protocol):
    """Where a client keeps what it carries from round to round."""

    def load(self, round_num: int) -> Memory | None:
        """The memory staged in that round, if it is still here."""
        ...

    def stage(self, round_num: int, memory: Memory) -> None:
        """Keep the memory of a round; it takes effect when a later task names that round as accepted."""
        ...


class KeptMemories:
    """Memories in a dictionary, for simulations and tests: the accepted one and the one staged last."""

    def __init__(self) -> None:
        self._staged: dict[int, Memory] = {}
        self._accepted = -1

    def load(self, round_num: int) -> Memory | None:
        self._accepted = round_num
        return self._staged.get(round_num)

    def stage(self, round_num: int, memory: Memory) -> None:
        kept = {n: m for n, m in self._staged.items() if n == self._accepted}
        self._staged = {**kept, round_num: memory}


def run_task(
    strategy: Strategy,
    task: Task,
    accepted_round: int,
    fallback: Memory,
    model: Tensors,
    trainer: Trainer,
    memories: Memories,
) -> Update:
    """Fit one task. The window slides only past rounds whose update the server accepted: the task names the
    last one, and a round that was lost is done again from the same memory. ``fallback`` is the coordinator's
    copy, for a device that lost its own."""
    memory = (memories.load(accepted_round) or fallback) if accepted_round >= 0 else Memory()
    update, after = strategy.fit(task, model, memory, trainer)
    memories.stage(task.round_num, after)
    return update
