"""DepthFL (Kim et al., 2023): a slow client trains the first blocks, with exits on the way (algorithms 6).

The exits of one client teach each other, so that deep ones, which few clients train, learn from shallow ones.
The model predicts by the mean of the exits' logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedel.core.timing import fits, step_cost
from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    Method,
    check_damping,
    check_scope,
    draw,
    one_of,
    task_for,
    train_spec_for,
    update_of,
    whole_step,
)
from fedel.types import (
    Array,
    Fold,
    Folded,
    Hook,
    Memory,
    ModelSpec,
    Patch,
    Plan,
    Role,
    RoundContext,
    StepCost,
    Task,
    Tensors,
    TimingProfile,
    Trainer,
    Training,
    Update,
    Value,
    Window,
)

STATE_PREFIX = "feddyn/"
"""Marks the server's FedDyn tensors among the state that a fold hands on."""


@dataclass(frozen=True)
class DepthFL(Method):
    name: ClassVar[str] = "depthfl"

    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation, or ``train``, the whole step."""
    distil: bool = True
    """Let the exits of a client learn from each other."""
    ramp: float = 0.3
    """Share of the run's rounds until distillation has its full weight; the reference takes 300 rounds."""
    feddyn_alpha: float = 0.0
    """Strength of FedDyn's regulariser (the reference takes 0.1); 0 switches it off."""
    num_clients: int = 0
    """Clients in the whole federation, not in a round; FedDyn needs it."""
    weighting: str = "uniform"
    """How much a client counts in the masked mean: ``uniform`` or ``samples``."""
    damping: float = 0.0
    """How much less a value moves the fewer clients trained it: ``share ** damping`` of the way to their mean,
    where share is their part of the round's clients, by weight. 0: all the way, as in the paper."""

    def __post_init__(self) -> None:
        if not 0 <= self.ramp <= 1:
            raise ValueError(f"ramp = {self.ramp:g}: a share of the run's rounds lies between 0 and 1")
        if self.feddyn_alpha < 0:
            raise ValueError(f"feddyn_alpha = {self.feddyn_alpha:g}: at least 0, which switches FedDyn off")
        if self.feddyn_alpha and self.num_clients < 1:
            raise ValueError(
                f"feddyn_alpha = {self.feddyn_alpha:g} needs num_clients, the size of the federation: set it"
            )
        if self.feddyn_alpha and self.damping:
            raise ValueError(
                f"damping = {self.damping:g} does not go with feddyn_alpha: FedDyn's own memory counts how many"
                " clients trained a tensor; set one of them to 0"
            )
        check_scope(self.budget_scope)
        one_of("weighting", self.weighting, WEIGHTINGS)
        check_damping(self.damping)

    def exits_to_average(self, spec: ModelSpec) -> tuple[int, ...]:
        # Exits between the cuts are never trained.
        return depths(spec)

    def plan(self, context: RoundContext) -> Plan:
        tasks, strength = [], ramp(context.round_num, self.ramp * context.num_rounds)
        for client in draw(context):
            depth = self.depth_for(context.spec, client.profile, context.budget_seconds)
            tasks.append(task_for(context, client, {"depth": float(depth), "distil": strength}))
        return Plan(tuple(tasks))

    def depth_for(self, spec: ModelSpec, profile: TimingProfile, budget_seconds: float) -> int:
        """The deepest prefix whose step fits the budget; the shallowest of all if none does.

        T_th is the plain model's time on some device. One that keeps it with the plain model gets the whole
        network although its exits come on top: otherwise nobody would train the last blocks.
        """
        scope = self.budget_scope
        if fits(whole_step(spec, profile).total(scope), budget_seconds):
            return spec.num_blocks
        fitting = [d for d in depths(spec) if fits(prefix_step(spec, profile, d).total(scope), budget_seconds)]
        return max(fitting, default=depths(spec)[0])

    def tensors_needed(self, task: Task, memory: Memory, trainer: Trainer) -> Collection[str] | None:  # noqa: ARG002
        """Blocks up to the client's depth, and its exits."""
        return trainer.spec.tensors_for(exits_of(trainer.spec, int(task.settings["depth"])))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        spec, depth = trainer.spec, int(task.settings["depth"])
        exits = exits_of(spec, depth)
        selected = {t.name for t in spec.weights_in(1, depth)}
        hooks: list[Hook] = []
        if self.distil and len(exits) > 1:
            hooks.append(Distillation(task.settings["distil"]))
        if self.feddyn_alpha:
            hooks.append(FedDyn(self.feddyn_alpha, memory.tensors))
        train_spec = train_spec_for(task, trainer, selected, Window(1, depth), exits)
        train_spec = replace(train_spec, hooks=tuple(hooks))
        trained = trainer.train(model, train_spec)
        cost = prefix_step(spec, trainer.profile, depth)
        in_budget = fits(cost.total(self.budget_scope), task.budget_seconds)
        over = depth == depths(spec)[0] and not in_budget
        update = update_of(task, model, trainer, train_spec, trained, cost, Window(1, depth), over_budget=over)
        if self.feddyn_alpha:
            memory = replace(memory, tensors=self._drift(spec, model, memory.tensors, trained.patches))
        return update, memory

    def fold(self, spec: ModelSpec) -> Fold:
        if self.feddyn_alpha:
            return _FedDynFold(spec, self.weighting, self.feddyn_alpha, self.num_clients)
        return MeanFold(spec, self.weighting, self.damping)

    def _drift(
        self, spec: ModelSpec, model: Tensors, drift: Tensors, patches: Mapping[str, Patch]
    ) -> dict[str, Array]:
        """h_n <- h_n - alpha (w_n - w_r), of every tensor the client trained."""
        new = dict(drift)
        for name, patch in patches.items():
            if spec.by_name[name].role is not Role.BUFFER:
                new[name] = new.get(name, np.float32(0)) - self.feddyn_alpha * (patch.values - model[name])
        return new


@dataclass(frozen=True)
class Distillation(Hook):
    """Adds to the loss how far each exit is from what the others predict."""

    all_exits: ClassVar[bool] = True

    strength: float

    def loss(self, training: Training, loss: Value, logits: Sequence[Value], targets: Value) -> Value:  # noqa: ARG002
        return loss + self.strength * mutual_distillation(logits)


@dataclass(frozen=True)
class FedDyn(Hook):
    """Adds ``alpha (w - w_r) - h_n`` to the gradient (algorithms 6.3)."""

    alpha: float
    drift: Tensors
    """h_n of this client."""

    def gradient(self, training: Training, name: str, gradient: Value) -> Value:
        gradient = gradient.add(training.weights[name] - training.start(name), alpha=self.alpha)
        return gradient.sub(training.part(name, self.drift[name])) if name in self.drift else gradient


class _FedDynFold:
    """The mean, moved on by the server's memory h of where the federation has drifted (algorithms 6.3)."""

    def __init__(self, spec: ModelSpec, weighting: str, alpha: float, num_clients: int) -> None:
        self._mean = MeanFold(spec, weighting)
        self._trained = {t.name for t in spec.tensors if t.role is not Role.BUFFER}
        self._counts: Counter[str] = Counter()
        self._alpha, self._num_clients = alpha, num_clients

    def add(self, update: Update) -> None:
        self._mean.add(update)
        self._counts.update(update.patches.keys() & self._trained)

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        new, memory = dict(self._mean.finish(model, state).model), dict(state)
        for name, count in self._counts.items():
            if name not in model:
                continue
            mean, old = new[name], model[name]
            drift = memory.get(STATE_PREFIX + name, np.zeros_like(old))
            share = self._alpha * count / self._num_clients
            drift = (drift - share * np.subtract(mean, old, dtype=np.float64)).astype(old.dtype)
            memory[STATE_PREFIX + name] = drift
            new[name] = (mean - np.divide(drift, self._alpha, dtype=np.float64)).astype(old.dtype)
        return Folded(new, memory)


def depths(spec: ModelSpec) -> tuple[int, ...]:
    """The blocks to cut after: the model's stages, or quarters of it where it has none to choose from."""
    if len(spec.stages) > 1:
        return spec.stages
    return tuple(sorted({math.ceil(spec.num_blocks * quarter / 4) for quarter in (1, 2, 3, 4)}))


def exits_of(spec: ModelSpec, depth: int) -> tuple[int, ...]:
    """The exits of a client of this depth: one at each cut, or at each block of a frozen trunk."""
    return spec.exits_for(1, depth) if spec.exit_each else tuple(d for d in depths(spec) if d <= depth)


def prefix_step(spec: ModelSpec, profile: TimingProfile, depth: int) -> StepCost:
    """One step of the blocks up to ``depth`` with all their exits."""
    selected = {t.name for t in spec.weights_in(1, depth)}
    return step_cost(profile, selected, exits_of(spec, depth), exit_each=spec.exit_each)


def mutual_distillation(logits: Sequence[Value]) -> Value:
    """Each exit learns from the others' predictions, which are held fixed: the mean over the others of the
    Kullback-Leibler divergence (temperature 1)."""
    students = [z.flatten(0, -2).log_softmax(-1) for z in logits]
    # The reference adds 1e-7 so that the logarithm of a prediction of zero stays finite.
    teachers = [s.detach().exp() + 1e-7 for s in students]
    total = 0.0
    for i, student in enumerate(students):
        for j, teacher in enumerate(teachers):
            if i != j:
                divergence = (teacher.xlogy(teacher) - teacher * student).sum() / len(student)
                total = total + divergence / (len(logits) - 1)
    return total


def ramp(round_num: int, ramp_rounds: float) -> float:
    """Weight of distillation in a round: next to nothing at first, 1 from ``ramp_rounds`` on.

    >>> [round(ramp(t, 300), 4) for t in (0, 150, 300, 1000)]
    [0.0067, 0.2865, 1.0, 1.0]
    >>> ramp(0, 0)
    1.0
    """
    return math.exp(-5 * max(0.0, 1 - round_num / ramp_rounds) ** 2) if ramp_rounds > 0 else 1.0
