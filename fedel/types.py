"""The words every part of FedEL speaks: models, windows, tasks, updates, timing profiles.

Plain frozen data, numpy and the standard library only. Two conventions hold everywhere:

* tensors and blocks stand in forward order, input first, in every list;
* blocks are numbered as in the paper, 1 to B, so ``block_seconds[b - 1]`` belongs to block ``b``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = Mapping[str, Array]
"""Tensor name -> values."""

Where = tuple[Any, ...] | NDArray[np.bool_] | None
"""The part of a tensor that a patch covers: ``None`` is all of it, else anything numpy can index with."""


class Role(Enum):
    """What a tensor is to the training."""

    WEIGHT = "weight"
    """Trainable, chosen (or not) by a strategy."""
    EXIT = "exit"
    """Belongs to the early exit after its block: trained whenever that exit is used."""
    BUFFER = "buffer"
    """Not trained but moved by training: batch-norm statistics."""
    FROZEN = "frozen"
    """Never changes: the pretrained trunk of ALBERT in mode ``frozen``."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, place and shape of one tensor of the model."""

    name: str
    block: int
    shape: tuple[int, ...]
    role: Role = Role.WEIGHT
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class ModelSpec:
    """What a strategy knows of a model: its blocks and its tensors, in forward order."""

    name: str
    block_names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    stages: tuple[int, ...] = ()
    """Blocks after which the network changes resolution; the depths DepthFL cuts at. The last is B."""
    exit_each: bool = False
    """Each block trains through its own exit (a frozen trunk), instead of one loss at the deep end."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_names)

    @cached_property
    def weights(self) -> tuple[TensorSpec, ...]:
        """The tensors a strategy chooses from."""
        return tuple(t for t in self.tensors if t.role is Role.WEIGHT)

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole model on the wire."""
        return 4 * sum(t.size for t in self.tensors)

    def weights_in(self, end: int, front: int) -> tuple[TensorSpec, ...]:
        """The weights of blocks ``end`` to ``front``, both included."""
        return tuple(t for t in self.weights if end <= t.block <= front)

    def exits_for(self, end: int, front: int) -> tuple[int, ...]:
        """The exits through which blocks ``end`` to ``front`` train."""
        return tuple(range(end, front + 1)) if self.exit_each else (front,)

    def subset(self, names: Collection[str]) -> ModelSpec:
        """The same model with some of its tensors, as one of several aggregators keeps it."""
        return replace(self, tensors=tuple(t for t in self.tensors if t.name in names))

    @cached_property
    def digest(self) -> str:
        """Two models with the same digest can exchange updates."""
        manifest = [[t.name, t.block, list(t.shape), t.role.value, t.dtype] for t in self.tensors]
        return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Window:
    """The blocks ``end`` to ``front`` (both included) a client trains; the front is the deep side."""

    end: int
    front: int

    def __contains__(self, block: int) -> bool:
        return self.end <= block <= self.front


@dataclass(frozen=True)
class TensorTime:
    """Backward seconds of one tensor in one training step."""

    name: str
    block: int
    grad_seconds: float
    """Gradient with respect to the input of the tensor's operation: paid to reach shallower tensors."""
    update_seconds: float
    """Gradient of the tensor itself and its optimiser step: paid when it is trained."""


@dataclass(frozen=True)
class BlockTime:
    """Forward seconds of one block, and the cost of the exit after it, in one training step."""

    forward_seconds: float
    exit_forward_seconds: float = 0.0
    exit_backward_seconds: float = 0.0
    frozen_forward_seconds: float = 0.0
    """Forward seconds below the window, without gradient and in evaluation mode; 0 where not measured."""


@dataclass(frozen=True)
class WidthTime:
    """One training step of the model narrowed to a share ``width`` of its channels."""

    width: float
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class TimingProfile:
    """How long each part of one training step takes on one device (paper, section 4.1)."""

    device: str
    model: str
    batch_size: int
    tensors: tuple[TensorTime, ...]
    blocks: tuple[BlockTime, ...]
    widths: tuple[WidthTime, ...] = ()
    overhead_seconds: float = 0.0
    """What a step costs besides forward and backward: fetching the batch, the loss, bookkeeping."""
    calibration: float = 1.0
    """Measured whole backward over the sum of its measured parts; already applied to the figures."""
    source: str = "measured"

    @cached_property
    def by_name(self) -> Mapping[str, TensorTime]:
        return {t.name: t for t in self.tensors}

    def scaled(self, slowness: float, device: str = "") -> TimingProfile:
        """The same work on a device ``slowness`` times slower.

        >>> fast = TimingProfile("orin", "toy", 4, (TensorTime("w", 1, 1.0, 2.0),), (BlockTime(3.0),))
        >>> fast.scaled(2).tensors[0].update_seconds
        4.0
        """
        s = slowness
        return replace(
            self,
            device=device or f"{self.device}/{s:g}",
            tensors=tuple(
                replace(t, grad_seconds=t.grad_seconds * s, update_seconds=t.update_seconds * s)
                for t in self.tensors
            ),
            blocks=tuple(
                BlockTime(
                    b.forward_seconds * s,
                    b.exit_forward_seconds * s,
                    b.exit_backward_seconds * s,
                    b.frozen_forward_seconds * s,
                )
                for b in self.blocks
            ),
            widths=tuple(
                WidthTime(w.width, w.forward_seconds * s, w.backward_seconds * s) for w in self.widths
            ),
            overhead_seconds=self.overhead_seconds * s,
        )


@dataclass(frozen=True)
class LocalWork:
    """How a client trains in one round, the same for every method."""

    num_steps: int = 50
    """Mini-batches a round; 0 means ``num_epochs`` passes over the client's own data instead."""
    num_epochs: int = 5
    batch_size: int = 32
    optimiser: str = "sgd"
    """``sgd`` or ``adamw``; always started fresh, nothing is carried over between rounds."""
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 5e-4
    clip_norm: float = 0.0
    """Gradient norm above which gradients are scaled down; 0 switches it off."""

    def steps_for(self, num_samples: int) -> int:
        """Steps of a client that holds ``num_samples``; in epoch mode the last, short batch counts.

        >>> LocalWork(num_steps=0, num_epochs=2, batch_size=32).steps_for(100)
        8
        """
        return self.num_steps or self.num_epochs * max(1, -(-num_samples // self.batch_size))


@dataclass(frozen=True)
class Task:
    """One client's order for one round."""

    round_num: int
    client: str
    budget_seconds: float
    """T_th of one training step."""
    work: LocalWork
    seed: int
    settings: Mapping[str, float] = field(default_factory=dict)
    """What the strategy's plan decided for this client, e.g. ``{"width": 0.5}``."""
    global_importance: Mapping[str, float] = field(default_factory=dict)
    """Squared change of each tensor in the last round; empty in round 0."""


@dataclass(frozen=True)
class Patch:
    """New values for a tensor, or for the part of it that ``where`` indexes."""

    values: Array
    where: Where = None


@dataclass(frozen=True)
class StepCost:
    """Predicted seconds of one training step, by phase."""

    forward_seconds: float
    backward_seconds: float

    def total(self, scope: str) -> float:
        """Seconds that count against T_th in the given budget scope (``backward`` or ``train``)."""
        return self.backward_seconds if scope == "backward" else self.forward_seconds + self.backward_seconds


FREE = StepCost(0.0, 0.0)


@dataclass(frozen=True)
class Report:
    """What a client tells about the round it trained."""

    client: str
    round_num: int
    num_samples: int
    """Samples the client holds: its weight where a fold weighs."""
    num_steps: int
    effective_steps: float
    """FedNova's a_n: the l1 norm of the weights that local steps carry in the final update."""
    loss: float
    """Mean training loss over the round."""
    loss_square: float = 0.0
    """Moving average of the mean squared sample loss, the statistic Oort ranks clients by."""
    update_norm: float = 0.0
    cost: StepCost = FREE
    """Predicted seconds of one step."""
    probe: StepCost = FREE
    """Predicted seconds of measuring importance, once a round."""
    train_seconds: float = 0.0
    """Measured seconds of training, probe included; 0 where nothing ran on a clock."""
    peak_memory_bytes: int = 0
    window: Window | None = None
    resets: int = 0
    rounds_held: int = 0
    selected: tuple[str, ...] = ()
    """Weights trained this round."""
    over_budget: bool = False
    """Even the smallest useful piece of work did not fit the budget."""


@dataclass(frozen=True)
class Update:
    """What a client sends: patches of the tensors it trained, and its report."""

    patches: Mapping[str, Patch]
    report: Report


@dataclass(frozen=True)
class Memory:
    """What a client carries from one of its rounds to the next; kept only once its update was accepted."""

    window: Window | None = None
    selected: tuple[str, ...] = ()
    resets: int = 0
    rounds_held: int = 0
    """Rounds the window has stood still, for the variant without rollback."""
    tensors: Tensors = field(default_factory=dict)
    """Per-client state of a method, such as FedDyn's correction."""


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


@dataclass(frozen=True)
class ClientView:
    """What a plan knows of a client."""

    name: str
    num_samples: int
    profile: TimingProfile
    last: Report | None = None
    """Its report of the last round it took part in."""


@dataclass(frozen=True)
class RoundContext:
    """Everything a plan may look at."""

    round_num: int
    seed: int
    spec: ModelSpec
    clients: Sequence[ClientView]
    """Available clients, in a fixed order."""
    num_participants: int
    """How many to choose; 0 means all of them."""
    budget_seconds: float
    """T_th of one training step."""
    work: LocalWork
    global_importance: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the last plan of this run returned; JSON values only."""


@dataclass(frozen=True)
class Plan:
    """Who trains what in a round."""

    tasks: tuple[Task, ...]
    close_after_seconds: float | None = None
    """Close the round after this long although some clients are not back (TimelyFL)."""
    deadline_seconds: float = 0.0
    """When the round may close in any case; written in by the coordinator's role."""
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Folded:
    """What a fold made of a round's updates."""

    model: Tensors
    state: Tensors = field(default_factory=dict)
    """Server-side tensors of a method, handed to the next round's ``finish``."""


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
    def evaluation(self) -> str:
        """``final`` (the model's own classifier) or ``ensemble`` (mean logits of all exits)."""
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
