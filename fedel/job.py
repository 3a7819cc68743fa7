"""What a run is: the settings that a job file holds, the same in a federation and in a simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedel import config
from fedel.types import LocalWork

LATE_POLICIES = ("refuse", "next")


@dataclass(frozen=True)
class Budget:
    """T_th: the time one training step may take."""

    policy: str = "fastest"
    """``fastest`` device, ``percentile`` of the devices, ``share`` of the fastest, or ``fixed`` seconds."""
    value: float = 0.0
    """Percentile, share or seconds, where the policy takes one."""


@dataclass(frozen=True)
class Rounds:
    """How rounds are run."""

    num_rounds: int = 20
    num_participants: int = 0
    """Clients a round; 0 means all that are there."""
    over_select: float = 1.0
    """Invite this many times ``num_participants``; the round closes when enough are back."""
    min_clients: int = 1
    """Wait with the first round until so many clients have joined."""
    min_reports: int = 1
    """A round with fewer updates at its deadline is waited for, not closed."""
    deadline_factor: float = 8.0
    """Deadline of a round, as a multiple of T_th times the local steps."""
    deadline_floor_seconds: float = 60.0
    """No deadline is shorter: small models spend more time on the way than in training."""
    late: str = "refuse"
    """An update that arrives after its round closed: ``refuse`` it, or count it in the ``next`` round."""
    evaluate_every: int = 1
    """Test the model every so many rounds; 0 never. The last round is always tested then."""
    keep_every: int = 0
    """Keep the model of every so manieth round on disk; 0 keeps the newest and the best alone."""
    lr_decay: float = 1.0
    """Learning rate is multiplied by this after each round."""

    def __post_init__(self) -> None:
        if self.late not in LATE_POLICIES:
            raise ValueError(f"late = {self.late!r} is none of: {', '.join(LATE_POLICIES)}")
        if self.num_rounds < 1 or self.over_select < 1 or self.deadline_factor <= 0:
            raise ValueError("num_rounds and over_select are at least 1, deadline_factor is above 0")


@dataclass(frozen=True)
class Workload:
    """What is trained, and on what."""

    model: str = "vgg16"
    """A model that FedEL knows, or ``package.module:function`` for one's own."""
    data: str = "cifar10"
    """A data set that FedEL knows, or ``package.module:function`` for one's own."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model, such as ``width``; arguments of one's own function."""
    data_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set; arguments of one's own function."""


@dataclass(frozen=True)
class RunConfig:
    """A job."""

    seed: int = 0
    """Everything random in the run follows from it."""
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedel"})
    workload: Workload = field(default_factory=Workload)
    rounds: Rounds = field(default_factory=Rounds)
    budget: Budget = field(default_factory=Budget)
    work: LocalWork = field(default_factory=LocalWork)
    trainer: str = "fedel.training.factory:make_trainer"
    """What builds the trainer on a device: ``package.module:function``."""

    @staticmethod
    def parse(table: Mapping[str, Any], where: str = "job") -> RunConfig:
        return config.parse(RunConfig, table, where)

    def table(self) -> dict[str, Any]:
        """The effective configuration, every default written out."""
        return asdict(self)
