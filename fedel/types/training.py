"""Local training: what a strategy asks of a trainer, where it may step in, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fedel.types.model import Array, ModelSpec, Patch, Tensors, Window
from fedel.types.task import LocalWork
from fedel.types.timing import TimingProfile

Value = Any
"""An array of the trainer's own kind: a torch tensor, or a numpy array in a test."""


MAX_STATISTICS_BATCHES = 8
"""Batches over which a client measures batch-norm statistics with ``TrainSpec.static_norm``."""


class Training(Protocol):
    """What a hook sees of the local training it is part of."""

    @property
    def work(self) -> LocalWork: ...

    @property
    def weights(self) -> Mapping[str, Value]:
        """The tensors that train, in forward order; ``weight.sub_(x)`` and the like change the model."""
        ...

    def start(self, name: str) -> Value:
        """What the tensor was when the round began."""
        ...

    def part(self, name: str, values: Array) -> Value:
        """Values for the whole tensor, cut to the part that trains here and in the trainer's own kind."""
        ...

    def index(self, places: Array) -> Value:
        """Numbers of rows, classes or channels as the trainer's own kind."""
        ...


class Hook:
    """Changes local training. A method that trains differently brings one, declared in the method's own file.

    Make it a frozen dataclass and override what the method needs; as they are, these functions change nothing.
    They get the trainer's own values and work with operators and the values' own methods
    (``gradient.add(weight, alpha=mu)``), so that a method's file imports no torch.
    """

    all_exits: ClassVar[bool] = False
    """The loss looks at every exit of the ``TrainSpec``, also at those that have nothing to train."""

    def reweighted(self) -> Collection[str]:
        """Weights that the forward pass takes through ``used_weight``."""
        return ()

    def used_weight(self, weight: Value) -> Value:
        """What the forward pass uses in place of a weight in ``reweighted``."""
        return weight

    def narrowed_output(self, output: Value) -> Value:
        """The output of a layer that ``TrainSpec.width`` made narrower."""
        return output

    def logits(self, training: Training, logits: Value) -> Value:  # noqa: ARG002
        """The logits of one exit, before the loss."""
        return logits

    def loss(
        self,
        training: Training,  # noqa: ARG002
        loss: Value,
        logits: Sequence[Value],  # noqa: ARG002
        targets: Value,  # noqa: ARG002
    ) -> Value:
        """The loss of a batch; ``loss`` is the sum of the cross-entropies at the exits."""
        return loss

    def gradient(self, training: Training, name: str, gradient: Value) -> Value:  # noqa: ARG002
        """The gradient of a tensor, before clipping."""
        return gradient

    def step(self, training: Training, take_step: Callable[[], None]) -> None:  # noqa: ARG002
        """One step of the optimiser: do something before or after it."""
        take_step()

    def finish(self, training: Training) -> None:
        """After the last step, before the weights are read out."""


class Pace(Protocol):
    """Ends a training by something else than the number of its steps, such as a clock."""

    def next_share(self, num_done: int) -> float:
        """As in ``TrainSpec``. Asked before every step, and once after the last one."""
        ...


@dataclass(frozen=True)
class TrainSpec:
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
    width: float = 1.0
    """Share of every hidden layer's channels to train. No hook: it decides which network is built."""
    static_norm: bool = False
    """Batch norm uses batch statistics only; the client sends the statistics of the model as it received it.
    No hook: it decides what the network's buffers are."""
    hooks: tuple[Hook, ...] = ()
    """What the method changes in training, applied in this order."""
    prefix_cache_bytes: int = 0
    """Room to keep the outputs of the frozen blocks below ``end``, for samples that come again; 0 keeps none.
    The result is the same. Data that is augmented gives other inputs each time and is never kept."""
    last_share: float = 1.0
    """Share of a batch in the last step: what is left of T_th after the whole ones."""
    pace: Pace | None = None
    """What ends the training; without one it makes ``num_steps``."""
    detached: bool = False
    """Exits but the last one learn from what their blocks give, and their losses do not reach the blocks."""

    def next_share(self, num_done: int) -> float:
        """Share of a batch in the step after ``num_done``; below 1 only in the last one, and 0 after it."""
        if self.pace:
            return self.pace.next_share(num_done)
        if num_done >= self.num_steps:
            return 0.0
        return self.last_share if num_done == self.num_steps - 1 else 1.0


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    patches: Mapping[str, Patch]
    """Selected weights, heads of the exits used, statistics of the blocks that trained."""
    num_steps: int
    """Steps that were made, a short last one included."""
    effective_steps: float
    """FedNova's a_n, as in ``Report``."""
    loss: float
    """Mean training loss."""
    loss_square: float = 0.0
    """As in ``Report``."""
    seconds: float = 0.0
    """Measured, probe included; 0 where nothing ran on a clock."""
    probe_seconds: float = 0.0
    """Measured seconds of the probe before it, where somebody measured that."""
    step_seconds: float = 0.0
    """Measured seconds of one step, as a median: the first one often takes longer."""
    peak_memory_bytes: int = 0
    last_share: float = 1.0
    """As in ``Report``."""


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
        """Labels the client holds, sorted; empty where they are unknown or, as in text, too many."""
        ...

    @property
    def same_inputs(self) -> bool:
        """Whether a sample gives the same input each time it comes; not so where data is augmented."""
        ...

    def profile_again(self) -> bool:
        """Measure the timing profile once more; False where it was not measured here."""
        ...

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        """First-order loss change <g1, dw> of every weight in the window, by a trial step (negative helps).

        ``model`` has at least the tensors that run, ``spec.tensors_for`` the window's exits. Nothing of it, or
        of the trainer's state, is different afterwards.
        """
        ...

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        """Train from ``model``, which has at least the tensors that run, as ``train_spec`` says."""
        ...
