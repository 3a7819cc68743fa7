"""What a device passes to the function that builds its trainer, and what it gets back. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedel.data.partition import METHODS
from fedel.job import RunConfig
from fedel.types import Tensors, Trainer

COMPUTE = ("exact", "fast")
"""``exact``: results have the same bits in a simulation and on devices. ``fast`` keeps the channels of an image
together in memory, for which torch has faster kernels, and a simulation trains clients side by side; both add
in another order."""


@dataclass(frozen=True)
class DataPart:
    """Which samples of the run's data set this client trains on."""

    index: int = 0
    """This client's part, from 0."""
    of: int = 1
    """Parts in all, the same at every client; 1 takes the whole training set."""
    method: str = field(default="dirichlet", metadata={"words": METHODS})
    """``dirichlet``, ``dirichlet-equal``, ``user`` (natural owners) or ``iid``."""
    alpha: float = 0.1
    """Concentration of ``dirichlet``; small is uneven."""
    balance: bool = True
    """A client that already holds its even share of the samples is skipped for the remaining classes."""
    min_size: int = 10
    """Draw again until the smallest part holds this many samples."""
    seed: int = 0
    """Seed of the split, the same at every client."""
    root: str = ""
    """Directory of data sets; empty means ``$FEDEL_DATA`` or the cache."""
    held_out: float = 0.0
    """Share of this client's samples that it does not train on: it tests models on them, if the job asks."""

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out = {self.held_out:g}: a share, at least 0 and below 1")
        if not 0 <= self.index < self.of:
            raise ValueError(f"index = {self.index} is not one of the parts 0 to {self.of - 1}: see 'of'")


@dataclass(frozen=True)
class TrainerSettings:
    """This device's side of a trainer; the run's side is ``RunConfig``."""

    data: DataPart = field(default_factory=DataPart)
    device: str = "cpu"
    """``cpu``, ``cuda``, ``cuda:1``, ..."""
    threads: int = 0
    """CPU threads of torch; 0: torch decides."""
    evaluate: bool = True
    """Offer to test models, where the data set has test data."""
    profile: Path | None = None
    """A timing profile to use; ``None`` measures one, once."""
    cache_dir: Path | None = None
    """Where measured profiles are kept; ``None`` keeps none."""
    memory_bytes: int = 0
    """What this process may use of the device's memory; 0 is no limit."""


class Score(Protocol):
    """How good a model is."""

    @property
    def accuracy(self) -> float: ...

    @property
    def loss(self) -> float: ...

    @property
    def num_targets(self) -> int: ...


Evaluator = Callable[[Tensors, Collection[int]], Score]
"""Tests a model by the exits that ``Strategy.exits_to_average`` names; without any, by its last one.

It is called in the thread that trains, between two trainings. With a method ``beside_training() -> Evaluator``
it is not: the evaluator that this returns, which shares nothing with the trainer, is called in another thread
at the same time. The method itself is called once, in the thread that trains.
"""


@dataclass(frozen=True)
class HeldOut:
    """The samples that a client does not train on."""

    test: Evaluator
    num_samples: int


MakeTrainer = Callable[
    [RunConfig, TrainerSettings],
    tuple[Trainer, Evaluator | None] | tuple[Trainer, Evaluator | None, HeldOut | None],
]
"""What ``RunConfig.trainer`` names; the third part may be left out."""
