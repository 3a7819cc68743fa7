"""What the methods share: drawing participants, writing tasks, means as folds, assembling an update."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import ClassVar

import numpy as np

from fedel.core.aggregation import MaskedMean
from fedel.core.timing import STEP_SCOPES, full_step
from fedel.seeds import derive, generator
from fedel.types import (
    FREE,
    MAX_STATISTICS_BATCHES,
    ClientView,
    Folded,
    Hook,
    LocalWork,
    Memory,
    ModelSpec,
    Patch,
    Report,
    Role,
    RoundContext,
    Speed,
    StepCost,
    Strategy,
    Task,
    Tensors,
    TimingProfile,
    Trained,
    Trainer,
    TrainSpec,
    Update,
    Window,
)

WEIGHTINGS = ("uniform", "samples")
STEPS = ("", "plan", "fit")
DEVICE_CLOCK = "train"
"""Default clock of a federation: its coordinator waits for whole steps."""
PAPER_CLOCK = "backward"
"""Default clock of a simulation: the paper's counts the backward pass only."""


def one_of(name: str, value: str, allowed: Collection[str]) -> None:
    """Check an option that takes one of a few words."""
    if value not in allowed:
        raise ValueError(f"{name} = {value!r} is not one of: {', '.join(allowed)}")


def check_scope(scope: str, allowed: Collection[str] = STEP_SCOPES) -> None:
    one_of("budget_scope", scope, allowed)


def steps_fit(steps: str, scope: str) -> bool:
    """Whether clients make as many steps as T_th pays for; the paper's simulation keeps to the plan.

    >>> steps_fit("", "backward"), steps_fit("", "round"), steps_fit("plan", "round")
    (False, True, False)
    """
    return steps == "fit" or (not steps and scope != "backward")


def clock_of(strategy: Strategy, default: str = DEVICE_CLOCK) -> str:
    """The clock of a run: the one that the method holds T_th against, or ``default`` if it has no budget.

    Such a method (FedAvg) still gets a T_th: deadlines are multiples of it, and every client's deviation from
    it is written down.
    """
    return strategy.budget_scope or default


def check_damping(damping: float) -> None:
    if not 0 <= damping <= 1:
        raise ValueError(
            f"damping = {damping:g}: between 0, the mean as it is, and 1, a client counts as no change where it"
            " trained nothing"
        )


class Method:
    """What most methods say about themselves: no budget, no narrower models, the last exit is tested."""

    budget_scope: str = ""
    widths: tuple[float, ...] = ()
    sends_parts: ClassVar[bool] = False
    """Whether updates hold parts of tensors; secure aggregation sums whole ones."""
    fits_memory: ClassVar[bool] = False
    """Whether it trains less where ``Task.memory_bytes`` says so."""

    @property
    def fits_steps(self) -> bool:
        return False

    def exits_to_average(self, spec: ModelSpec) -> tuple[int, ...]:  # noqa: ARG002
        return ()

    def tensors_needed(self, task: Task, memory: Memory, trainer: Trainer) -> Collection[str] | None:  # noqa: ARG002
        return None


def needed_by(strategy: Strategy, task: Task, memory: Memory, trainer: Trainer) -> frozenset[str]:
    """Names of the tensors that a method's ``fit`` uses for this task.

    All of them where a class has a ``fit`` of its own and does not say what that needs: what it inherits speaks
    of another ``fit``.
    """
    named = None
    for kind in type(strategy).__mro__:
        if "tensors_needed" in vars(kind):
            named = strategy.tensors_needed(task, memory, trainer)
            break
        if "fit" in vars(kind):
            break
    return frozenset(trainer.spec.by_name if named is None else named)


def draw(context: RoundContext) -> list[ClientView]:
    """Participants drawn uniformly: the same ones for every method that draws, given the run's seed."""
    clients = list(context.clients)
    if not 0 < context.num_participants < len(clients):
        return clients
    rng = generator(context.seed, "participants", context.round_num)
    chosen = rng.choice(len(clients), size=context.num_participants, replace=False)
    return [clients[i] for i in sorted(chosen)]


def task_for(
    context: RoundContext,
    client: ClientView,
    settings: Mapping[str, float] | None = None,
    num_steps: int | None = None,
) -> Task:
    """The client's task; ``num_steps`` overrides the local work that all clients share."""
    work: LocalWork = context.work if num_steps is None else replace(context.work, num_steps=num_steps)
    return Task(
        round_num=context.round_num,
        client=client.name,
        budget_seconds=context.budget_seconds,
        work=work,
        seed=derive(context.seed, "train", context.round_num, client.name),
        settings=settings or {},
        global_importance=context.global_importance,
        memory_bytes=client.profile.memory_limit_bytes,
    )


def train_spec_for(
    task: Task,
    trainer: Trainer,
    selected: Collection[str],
    window: Window,
    exits: tuple[int, ...] = (),
    num_steps: int | None = None,
    last_share: float = 1.0,
) -> TrainSpec:
    """A training of ``selected`` inside ``window``, through the exits that the model trains by.

    ``num_steps`` replaces those of the plan.
    """
    return TrainSpec(
        work=task.work,
        num_steps=task.work.steps_for(trainer.num_samples) if num_steps is None else num_steps,
        seed=task.seed,
        selected=frozenset(selected),
        exits=exits or trainer.spec.exits_for(window.end, window.front),
        end=window.end,
        last_share=last_share,
    )


def whole(spec: ModelSpec) -> Window:
    return Window(1, spec.num_blocks)


def whole_step(spec: ModelSpec, profile: TimingProfile) -> StepCost:
    """One step as FedAvg trains."""
    return full_step(profile, spec.exit_each)


def statistics_cost(task: Task, trainer: Trainer) -> StepCost:
    """What measuring batch-norm statistics costs, once per round: whole batches forward, at full width."""
    spec, size = trainer.spec, min(task.work.batch_size, trainer.num_samples)
    if not any(tensor.role is Role.BUFFER for tensor in spec.tensors):
        return FREE
    num_batches = min(trainer.num_samples // size, MAX_STATISTICS_BATCHES)
    forward = whole_step(spec, trainer.profile).forward_seconds
    return StepCost(num_batches * forward * task.speed.probe_slowness / task.speed.slowness, 0.0)


def update_of(
    task: Task,
    model: Tensors,
    trainer: Trainer,
    train_spec: TrainSpec,
    trained: Trained,
    cost: StepCost,
    window: Window | None = None,
    probe: StepCost = FREE,
    resets: int = 0,
    rounds_held: int = 0,
    over_budget: bool = False,
) -> Update:
    """The update a client sends, with its report."""
    report = Report(
        client=task.client,
        round_num=task.round_num,
        num_samples=trainer.num_samples,
        num_steps=trained.num_steps,
        effective_steps=trained.effective_steps,
        loss=trained.loss,
        loss_square=trained.loss_square,
        update_norm=_norm_of_change(trainer.spec, model, trained.patches),
        cost=cost,
        probe=probe,
        train_seconds=trained.seconds,
        probe_seconds=trained.probe_seconds,
        step_seconds=trained.step_seconds,
        peak_memory_bytes=trained.peak_memory_bytes,
        window=window,
        resets=resets,
        rounds_held=rounds_held,
        selected=tuple(t.name for t in trainer.spec.weights if t.name in train_spec.selected),
        over_budget=over_budget,
        last_share=trained.last_share,
    )
    return Update(trained.patches, report)


def _norm_of_change(spec: ModelSpec, model: Tensors, patches: Mapping[str, Patch]) -> float:
    square = 0.0
    for name, patch in patches.items():
        if spec.by_name[name].role is Role.BUFFER:
            continue
        old = model[name] if patch.where is None else model[name][patch.where]
        change = np.subtract(patch.values, old, dtype=np.float64).ravel()
        square += float(change @ change)
    return float(np.sqrt(square))


class WrappedTrainer:
    """A trainer that behaves like another one, except where a subclass says otherwise."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def spec(self) -> ModelSpec:
        return self._trainer.spec

    @property
    def profile(self) -> TimingProfile:
        return self._trainer.profile

    @property
    def num_samples(self) -> int:
        return self._trainer.num_samples

    @property
    def classes(self) -> tuple[int, ...]:
        return self._trainer.classes

    def profile_again(self) -> bool:
        return self._trainer.profile_again()

    @property
    def same_inputs(self) -> bool:
        return self._trainer.same_inputs

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        return self._trainer.probe(model, window, work, seed)

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        return self._trainer.train(model, train_spec)


class CorrectedTrainer(WrappedTrainer):
    """A trainer whose timing profile is corrected by what earlier rounds measured, for whatever method."""

    def __init__(self, trainer: Trainer, speed: Speed) -> None:
        super().__init__(trainer)
        profile = trainer.profile
        self._profile = profile if speed.slowness == 1 else profile.scaled(speed.slowness, profile.device)

    @property
    def profile(self) -> TimingProfile:
        return self._profile


class HookedTrainer(WrappedTrainer):
    """A trainer that adds hooks to everything a method has it train; the importance probe goes without."""

    def __init__(self, trainer: Trainer, *hooks: Hook) -> None:
        super().__init__(trainer)
        self._hooks = hooks

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        return super().train(model, replace(train_spec, hooks=(*train_spec.hooks, *self._hooks)))


class MeanFold:
    """The masked mean as a fold, each client counting one or as often as it has samples."""

    def __init__(self, spec: ModelSpec, weighting: str, damping: float = 0.0) -> None:
        self._by_samples = weighting == "samples"
        self.damping = damping
        shapes = {t.name: t.shape for t in spec.tensors}
        self._mean = MaskedMean(shapes, weighted=self._by_samples, damping=damping)

    def add(self, update: Update) -> None:
        self._mean.add(update.patches, update.report.num_samples if self._by_samples else 1)

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        return Folded(self._mean.finish(model), state)
