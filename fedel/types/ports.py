"""The two ports: ``Strategy``, which a method implements, and ``Trainer``, which it trains through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fedel.types.model import ModelSpec, Patch, Tensors, Window
from fedel.types.task import Folded, LocalWork, Memory, Plan, RoundContext, Task, Update
from fedel.types.timing import TimingProfile


@dataclass(frozen=True)
class Job:
    """What a strategy asks of a trainer."""

    work: LocalWork
    num_steps: int
    seed: int
    selected: frozenset[str]
    """Weights to train; every other weight stays as it is, to the bit."""
    exits: tuple[int, ...]
    """Blocks at whose exits a loss is taken; nothing deeper than the last one runs."""
    end: int = 1
    """Blocks shallower than this run without gradient, in evaluation mode."""
    proximal: float = 0.0
    """FedProx's mu."""
    distil: float = 0.0
    """Weight of mutual distillation between the exits (DepthFL)."""
    width: float = 1.0
    """Share of every hidden layer's channels to train (HeteroFL)."""
    width_scaler: bool = False
    """Divide activations by ``width`` while training (HeteroFL)."""
    static_norm: bool = False
    """Batch norm by batch statistics alone; statistics of the model as it came are sent along (HeteroFL)."""
    masked_loss: bool = False
    """Logits of classes the client does not hold are set to zero in the loss (HeteroFL)."""
    threshold: float | None = None
    """Weights below this magnitude are masked out in every forward pass (FIARSE)."""
    dyn_alpha: float = 0.0
    """FedDyn's alpha; 0 switches the regulariser off."""
    dyn_drift: Tensors = field(default_factory=dict)
    """FedDyn's h_n of this client."""


@dataclass(frozen=True)
class Trained:
    """What came of a job."""

    patches: Mapping[str, Patch]
    """Selected weights, heads of the exits used, statistics of the blocks that trained."""
    effective_steps: float
    loss: float
    loss_square: float = 0.0
    seconds: float = 0.0
    peak_memory_bytes: int = 0


class Trainer(Protocol):
    """The port through which a strategy's ``fit`` trains; torch is behind it, or a fake in tests."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def profile(self) -> TimingProfile: ...

    @property
    def num_samples(self) -> int: ...

    @property
    def classes(self) -> tuple[int, ...]:
        """Labels the client holds, sorted; empty where they are unknown or, as in text, not a few."""
        ...

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        """First-order loss change <g1, dw> of every weight in the window, by a trial step (negative helps).

        Nothing of ``model`` or of the trainer's state is different afterwards.
        """
        ...

    def train(self, model: Tensors, job: Job) -> Trained:
        """Train from ``model`` as the job says."""
        ...


class Fold(Protocol):
    """Turns a round's updates into the next model, one at a time, in any order, with the same bits."""

    def add(self, update: Update) -> None: ...

    def finish(self, model: Tensors, state: Tensors) -> Folded: ...


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
        """The clock it holds T_th against, ``backward`` or ``train``; empty for a method without a budget."""
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

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        """On the edge: choose what to train, train it; keep the memory once the update is accepted."""
        ...

    def fold(self, spec: ModelSpec) -> Fold:
        """On the aggregator: an empty fold for one round."""
        ...
