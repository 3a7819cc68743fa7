"""The port that a method implements: ``Strategy``, and the ``Fold`` that it makes for each round."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from fedel.types.model import ModelSpec, Tensors
from fedel.types.task import Folded, Memory, Plan, RoundContext, Task, Update
from fedel.types.training import Trainer


class Fold(Protocol):
    """Turns a round's updates into the next model, one at a time, in any order, with the same bits.

    ``RoundFold`` calls it, and raises ``VersionRefused`` where ``finish`` makes a value that is not finite:
    then nothing was made, and the caller leaves the version before in place.
    """

    def add(self, update: Update) -> None:
        """Take an update in, all of it or nothing: after ``UpdateRefused`` the fold is as it was before.

        After any other exception (memory ran out) nothing is known: the caller throws the fold away and makes
        it again, from the updates that count. The update's arrays stay as they are until the fold is dropped.
        """
        ...

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        """The next values of the tensors in ``model``, and the method's server-side state after that.

        ``model`` may hold some of the tensors only: an aggregator, which never has a whole model in memory,
        calls this for one after the other and hands the state that one call returned to the next.
        """
        ...


class Strategy(Protocol):
    """A method: three parts, named for where they run. An instance is frozen configuration."""

    @property
    def name(self) -> str: ...

    @property
    def weighting(self) -> str:
        """``samples`` or ``uniform``: how much a client counts in the fold."""
        ...

    @property
    def budget_scope(self) -> str:
        """What it counts against T_th: ``backward``, ``train`` or ``round``; empty if it has no budget."""
        ...

    @property
    def fits_steps(self) -> bool:
        """Whether its clients make as many steps as T_th pays for, fewer or more than the plan has."""
        ...

    @property
    def sends_parts(self) -> bool:
        """Whether updates hold parts of tensors; secure aggregation sums whole ones."""
        ...

    @property
    def fits_memory(self) -> bool:
        """Whether it trains less where ``Task.memory_bytes`` says so."""
        ...

    @property
    def widths(self) -> tuple[float, ...]:
        """Shares of the channels it may train; a device measures a step of each of these narrower models."""
        ...

    def exits_to_average(self, spec: ModelSpec) -> tuple[int, ...]:
        """Exits whose mean logits are the model's answer in a test; empty: the last exit by itself."""
        ...

    def plan(self, context: RoundContext) -> Plan:
        """On the coordinator: who trains, with which budget."""
        ...

    def tensors_needed(self, task: Task, memory: Memory, trainer: Trainer) -> Collection[str] | None:
        """On the edge, before the download: names of the tensors that ``fit`` uses, ``None`` for all of them.

        Only these are downloaded, and only these are in the ``model`` that ``fit`` gets.
        """
        ...

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        """On the edge: choose what to train, train it; keep the memory once the update is accepted."""
        ...

    def fold(self, spec: ModelSpec) -> Fold:
        """On the aggregator: an empty fold for one round."""
        ...
