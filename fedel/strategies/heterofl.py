"""HeteroFL (Diao et al., 2021): a slow client trains the first channels of every layer (algorithms 5).

Each value of the model is averaged over the clients whose sub-model contains it; in the classifier a client
counts only in the rows of the classes it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedel.core.timing import fits, width_step
from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    Method,
    check_damping,
    check_scope,
    draw,
    one_of,
    statistics_cost,
    task_for,
    train_spec_for,
    update_of,
    whole,
)
from fedel.types import (
    FREE,
    Fold,
    Hook,
    Memory,
    ModelSpec,
    Patch,
    Plan,
    Role,
    RoundContext,
    Task,
    Tensors,
    TimingProfile,
    Trainer,
    Training,
    TrainSpec,
    Update,
    Value,
)


@dataclass(frozen=True)
class HeteroFL(Method):
    name: ClassVar[str] = "heterofl"
    sends_parts: ClassVar[bool] = True

    widths: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    """Shares of the channels to choose from; a client gets the largest whose step fits its budget."""
    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation, or ``train``, the whole step."""
    scaler: bool = True
    """Divide activations by the width while training, so that wide and narrow models agree."""
    static_norm: bool = True
    """Batch norm uses batch statistics only; the global model's own are measured before training."""
    masked_loss: bool = True
    """Leave classes that the client does not hold out of its loss and of its classifier's rows."""
    clip_norm: float = 0.0
    """Gradient norm for this method only (the reference clips at 1); 0 keeps what all methods use."""
    weighting: str = "uniform"
    """How much a client counts in the mean: ``uniform`` or ``samples``."""
    damping: float = 0.0
    """How much less a value moves the fewer clients trained it: ``share ** damping`` of the way to their mean,
    where share is their part of the round's clients, by weight. 0: all the way, as in the paper."""

    def __post_init__(self) -> None:
        if not self.widths or not all(0 < width <= 1 for width in self.widths):
            raise ValueError(f"widths = {list(self.widths)}: give at least one share, each above 0 and up to 1")
        if self.clip_norm < 0:
            raise ValueError(f"clip_norm = {self.clip_norm:g}: a norm is at least 0; 0 switches it off")
        check_scope(self.budget_scope)
        one_of("weighting", self.weighting, WEIGHTINGS)
        check_damping(self.damping)

    def plan(self, context: RoundContext) -> Plan:
        return Plan(
            tuple(
                task_for(context, client, {"width": self.width_for(client.profile, context.budget_seconds)})
                for client in draw(context)
            )
        )

    def width_for(self, profile: TimingProfile, budget_seconds: float) -> float:
        """The largest width whose step fits the budget; the smallest of all if none does."""
        fitting = [width for width in self.widths if self._fits(profile, width, budget_seconds)]
        return max(fitting, default=min(self.widths))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        spec, width = trainer.spec, task.settings["width"]
        train_spec = replace(
            train_spec_for(task, trainer, {t.name for t in spec.weights}, whole(spec)),
            work=replace(task.work, clip_norm=self.clip_norm or task.work.clip_norm),
            width=width,
            static_norm=self.static_norm,
            hooks=self._hooks(width, trainer.classes),
        )
        trained = trainer.train(model, train_spec)
        if self.masked_loss and trainer.classes:
            trained = replace(trained, patches=own_rows(spec, train_spec, trained.patches, trainer.classes))
        over = not self._fits(trainer.profile, width, task.budget_seconds)
        cost = width_step(trainer.profile, width)
        probe = statistics_cost(task, trainer) if self.static_norm else FREE
        update = update_of(task, model, trainer, train_spec, trained, cost, probe=probe, over_budget=over)
        return update, memory

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting, self.damping)

    def _hooks(self, width: float, classes: tuple[int, ...]) -> tuple[Hook, ...]:
        scaler = (Scaler(width),) if self.scaler and width < 1 else ()
        return (*scaler, OwnClasses(classes)) if self.masked_loss and classes else scaler

    def _fits(self, profile: TimingProfile, width: float, budget_seconds: float) -> bool:
        return fits(width_step(profile, width).total(self.budget_scope), budget_seconds)


@dataclass(frozen=True)
class Scaler(Hook):
    """Divides the output of a narrower layer by the width: it then has the size it has in the whole model."""

    width: float

    def narrowed_output(self, output: Value) -> Value:
        return output * (1 / self.width)


@dataclass(frozen=True)
class OwnClasses(Hook):
    """Sets the logits of classes that the client does not hold to zero: they learn nothing from it."""

    classes: tuple[int, ...]

    def logits(self, training: Training, logits: Value) -> Value:
        absent = np.setdiff1d(np.arange(logits.shape[-1]), self.classes)
        return logits.index_fill(-1, training.index(absent), 0.0)


def own_rows(
    spec: ModelSpec, train_spec: TrainSpec, patches: Mapping[str, Patch], classes: tuple[int, ...]
) -> dict[str, Patch]:
    """The patches with those of the classifiers cut to the rows of ``classes``; classes are never narrowed."""
    rows = np.array(classes, dtype=np.int64)
    cut = dict(patches)
    for name in _classifiers(spec, train_spec.exits):
        if name in cut and len(cut[name].values) > rows[-1]:
            values, where = cut[name].values, cut[name].where
            columns = where[1:] if isinstance(where, tuple) else ()
            cut[name] = Patch(values[rows], (rows, *columns))
    return cut


def _classifiers(spec: ModelSpec, exits: tuple[int, ...]) -> list[str]:
    """Tensors of the layer that ends each exit: the last one that trains in its block."""
    names = []
    for block in exits:
        trained = [t.name for t in spec.tensors if t.block == block and t.role in (Role.WEIGHT, Role.EXIT)]
        layer = trained[-1].rpartition(".")[0] if trained else ""
        names += [name for name in trained if name.rpartition(".")[0] == layer]
    return names
