"""The client's part of a round: take up where the last accepted round left off, fit, stage the memory.

``recall`` and ``needed_by`` come before the model is here: they say which tensors of it to download.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from fedel.core.compression import compress_update
from fedel.types import Memory, SentUpdate, Strategy, Task, Tensors, Trainer

RESIDUAL = "residual:"
"""Tensors of a memory whose names begin like this are what compression has not sent yet."""


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


def recall(accepted_round: int, fallback: Memory, memories: Memories) -> Memory:
    """The memory that a task starts from. The window slides only past rounds whose update the server accepted:
    the task names the last one, and a round that was lost is done again from the same memory. ``fallback`` is
    the coordinator's copy, for a device that lost its own."""
    return (memories.load(accepted_round) or fallback) if accepted_round >= 0 else Memory()


def run_task(
    strategy: Strategy,
    task: Task,
    memory: Memory,
    model: Tensors,
    trainer: Trainer,
    memories: Memories,
) -> SentUpdate:
    """Fit one task. ``model`` has at least the tensors that ``needed_by`` names.

    Residuals are part of the memory: what a lost round had sent is not missing from them."""
    residuals = {n.removeprefix(RESIDUAL): v for n, v in memory.tensors.items() if n.startswith(RESIDUAL)}
    own = {name: values for name, values in memory.tensors.items() if not name.startswith(RESIDUAL)}
    update, after = strategy.fit(task, model, replace(memory, tensors=own), trainer)
    sent, residuals = compress_update(task.upload, trainer.spec, update, model, residuals)
    kept = {RESIDUAL + name: values for name, values in residuals.items()}
    memories.stage(task.round_num, replace(after, tensors={**after.tensors, **kept}))
    return sent
