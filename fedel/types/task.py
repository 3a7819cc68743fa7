"""What passes between coordinator, clients and aggregator in a round: context, plan, task, update, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedel.types.model import Change, ModelSpec, Patch, Tensors, Window
from fedel.types.timing import AS_PROFILED, FREE, Speed, StepCost, TimingProfile

PLAN_PACE, CLOCK_PACE = "plan", "clock"
PACES = (PLAN_PACE, CLOCK_PACE)
OPTIMISERS = ("sgd", "adamw")


@dataclass(frozen=True)
class LocalWork:
    """How a client trains in one round, the same for every method."""

    num_steps: int = 50
    """Mini-batches per round; 0 means ``num_epochs`` passes over the client's own data instead."""
    num_epochs: int = 5
    """Passes over the client's own data per round, if ``num_steps`` is 0."""
    batch_size: int = 32
    """Samples of a mini-batch."""
    optimiser: str = field(default="sgd", metadata={"words": OPTIMISERS})
    """``sgd`` or ``adamw``; always started fresh, nothing is carried over between rounds."""
    lr: float = 0.01
    """Learning rate of the first round; ``rounds.lr_decay`` changes it."""
    momentum: float = 0.9
    """Of ``sgd``: the share of the last step that each step has in addition."""
    weight_decay: float = 5e-4
    """How strongly every step pulls the weights towards zero."""
    clip_norm: float = 0.0
    """Gradient norm above which gradients are scaled down; 0 switches it off."""

    def steps_for(self, num_samples: int) -> int:
        """Steps of a client that holds ``num_samples``; in epoch mode the last, short batch counts.

        >>> LocalWork(num_steps=0, num_epochs=2, batch_size=32).steps_for(100)
        8
        """
        return self.num_steps or self.num_epochs * max(1, -(-num_samples // self.batch_size))


COMPRESSIONS = ("none", "fp16", "int8", "topk")


@dataclass(frozen=True)
class UploadSettings:
    """How updates travel (docs/compression.md)."""

    compression: str = "none"
    """``none`` sends trained values as they are. The others send how much they changed: ``fp16`` in 2 bytes,
    ``int8`` in 1 byte, ``topk`` only the largest changes. What is left out is sent later."""
    share: float = 0.1
    """Of every tensor, the share of the values that ``topk`` sends."""

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            known = ", ".join(COMPRESSIONS)
            raise ValueError(f"compression = {self.compression!r} is not one of: {known}")
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share:g}: topk sends more than 0 and at most 1 of the values")


PLAIN = UploadSettings()


@dataclass(frozen=True)
class Task:
    """What one client has to do in one round."""

    round_num: int
    client: str
    budget_seconds: float
    """T_th of one training step; ``num_rounds`` times as much for work that takes several rounds."""
    work: LocalWork
    seed: int
    settings: Mapping[str, float] = field(default_factory=dict)
    """What the strategy's plan decided for this client, e.g. ``{"width": 0.5}``."""
    global_importance: Mapping[str, float] = field(default_factory=dict)
    """Squared change of each tensor in the last round; empty in round 0."""
    pace: str = PLAN_PACE
    """``plan``: exactly the steps that follow from the profile; ``clock``: until T_th is over."""
    speed: Speed = AS_PROFILED
    """How the client did in the rounds before."""
    memory_bytes: int = 0
    """What the device may use of its memory in all; 0 is no limit."""
    upload: UploadSettings = PLAIN
    """How the update travels: what a tensor costs to send depends on it."""
    num_rounds: int = 1
    """Rounds that the work is planned to take; its own round does not wait for it if these are several."""

    def round_seconds(self, num_samples: int) -> float:
        """T_th of the whole round, or of all its rounds, for a client that holds ``num_samples``."""
        return self.budget_seconds * self.work.steps_for(num_samples)


@dataclass(frozen=True)
class Report:
    """What a client reports about the round it trained."""

    client: str
    round_num: int
    num_samples: int
    """Samples the client holds: its weight, where the fold weights clients."""
    num_steps: int
    """A short last one included: it moves the weights like any other."""
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
    """Predicted seconds of what is measured once per round: importance, or batch-norm statistics."""
    train_seconds: float = 0.0
    """Measured seconds of training, probe included; 0 where nothing ran on a clock."""
    probe_seconds: float = 0.0
    """Measured seconds of the importance probe."""
    step_seconds: float = 0.0
    """Measured seconds of one step, as a median."""
    peak_memory_bytes: int = 0
    window: Window | None = None
    resets: int = 0
    rounds_held: int = 0
    selected: tuple[str, ...] = ()
    """Weights trained this round."""
    over_budget: bool = False
    """Even the smallest useful piece of work did not fit the budget."""
    last_share: float = 1.0
    """Share of a batch in the last step, which is cut to what was left of T_th."""

    @property
    def batches(self) -> float:
        """What the steps come to in whole ones, which is what they cost."""
        return self.num_steps - 1 + self.last_share

    def seconds(self, scope: str) -> float:
        """Predicted seconds of the training: its steps and the probe."""
        return self.batches * self.cost.total(scope) + self.probe.total(scope)


@dataclass(frozen=True)
class Participant:
    """A client that may send an update in a round, and the limits of what it may report."""

    client: str
    round_num: int
    """Round of its task: the open one or, where late updates count, an earlier one."""
    num_samples: int
    """From its join: the weight of its update, whatever its report says."""
    max_steps: int
    max_effective_steps: float


@dataclass(frozen=True)
class Update:
    """What a client sends: patches of the tensors it trained, and its report."""

    patches: Mapping[str, Patch]
    report: Report


@dataclass(frozen=True)
class SentUpdate:
    """An update as it travels: the trained tensors may be compressed."""

    patches: Mapping[str, Patch | Change]
    report: Report


@dataclass(frozen=True)
class Memory:
    """What a client carries from one of its rounds to the next; kept only once its update was accepted."""

    window: Window | None = None
    selected: tuple[str, ...] = ()
    resets: int = 0
    rounds_held: int = 0
    """Number of rounds in which the window did not move, for the variant without rollback."""
    tensors: Tensors = field(default_factory=dict)
    """Per-client state of a method, such as FedDyn's correction; and what compression has not sent yet."""


@dataclass(frozen=True)
class ClientView:
    """What a plan knows of a client."""

    name: str
    num_samples: int
    profile: TimingProfile
    last: Report | None = None
    """Its report of the last round it took part in."""
    speed: Speed = AS_PROFILED
    """How it did in the rounds before; ``profile`` has its slowness in it."""


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
    num_rounds: int = 0
    """Rounds of the whole run; 0 where that is not known."""


@dataclass(frozen=True)
class Plan:
    """Who trains what in a round."""

    tasks: tuple[Task, ...]
    close_after_seconds: float | None = None
    """Close the round after this time even if some clients have not reported (TimelyFL)."""
    deadline_seconds: float = 0.0
    """Seconds after which the round may close in any case; the coordinator's role fills it in."""
    state: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def by_client(self) -> Mapping[str, Task]:
        return {task.client: task for task in self.tasks}

    @cached_property
    def in_one_round(self) -> frozenset[str]:
        """The clients for whose work the round waits."""
        return frozenset(task.client for task in self.tasks if task.num_rounds == 1)


@dataclass(frozen=True)
class Folded:
    """The result of folding a round's updates."""

    model: Tensors
    state: Tensors = field(default_factory=dict)
    """Server-side tensors of a method, passed to the next round's ``finish``."""
