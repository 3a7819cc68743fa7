"""A federation without torch: a trainer in numpy that answers to every field of a job, and an uneven fleet.

Each client pulls every tensor towards a place of its own, by noisy gradient steps. There is no forward pass,
but whatever a job or a client says moves the result, so that a field lost on the way shows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from fedel.core.importance import global_change
from fedel.core.sparsity import gradient_factor, maskable
from fedel.core.timing import budget
from fedel.seeds import derive, generator
from fedel.types import (
    Array,
    BlockTime,
    ClientView,
    Job,
    LocalWork,
    Memory,
    ModelSpec,
    Patch,
    Plan,
    Report,
    Role,
    RoundContext,
    Strategy,
    Tensors,
    TensorSpec,
    TensorTime,
    TimingProfile,
    Trained,
    Trainer,
    Update,
    Where,
    Window,
)

NUM_CLASSES = 5
CHANNELS = (4, 6, 6, 8, 8)
BLOCKS = ("stem", "norm", "three", "four", "five", "classifier")
WORK = LocalWork(num_steps=4, batch_size=8, lr=0.1, momentum=0.5, weight_decay=1e-3)


def spec() -> ModelSpec:
    """Five convolution-like blocks with an exit each, the second with a batch norm, and a classifier."""
    tensors: list[TensorSpec] = []
    inputs = 3
    for number, (name, outputs) in enumerate(zip(BLOCKS[:-1], CHANNELS, strict=True), start=1):
        tensors += _layer(f"blocks.{name}.conv", number, (outputs, inputs), Role.WEIGHT)
        if name == "norm":
            for tensor, role in _NORM.items():
                tensors.append(TensorSpec(f"blocks.{name}.bn.{tensor}", number, (outputs,), role))
        tensors += _layer(f"exits.{name}.linear", number, (NUM_CLASSES, outputs), Role.EXIT)
        inputs = outputs
    tensors += _layer("blocks.classifier.linear", len(BLOCKS), (NUM_CLASSES, inputs), Role.WEIGHT)
    return ModelSpec("fake", BLOCKS, tuple(tensors), stages=(2, 4, 6))


def frozen_spec() -> ModelSpec:
    """A frozen trunk of four blocks, each with a head that trains by itself (ALBERT's mode ``frozen``)."""
    names = ("pass1", "pass2", "pass3", "pass4")
    tensors: list[TensorSpec] = []
    for number, name in enumerate(names, start=1):
        tensors.append(TensorSpec(f"blocks.{name}.layer.weight", number, (6, 6), Role.FROZEN))
        tensors += _layer(f"exits.{name}.linear", number, (NUM_CLASSES, 6), Role.WEIGHT)
    return ModelSpec("frozen", names, tuple(tensors), exit_each=True)


def profile(slowness: float = 1.0, of: ModelSpec | None = None) -> TimingProfile:
    """A tensor costs its size in milliseconds to update, and a kernel half of that to pass through."""
    of = of or spec()
    times = tuple(
        TensorTime(t.name, t.block, t.size * 5e-4 if len(t.shape) > 1 else 0.0, t.size * 1e-3)
        for t in of.weights
    )
    blocks = tuple(
        BlockTime(2e-3 * block, 1e-3, 0.0 if of.exit_each or block == of.num_blocks else 2e-3)
        for block in range(1, of.num_blocks + 1)
    )
    fastest = TimingProfile("fake", of.name, WORK.batch_size, times, blocks, overhead_seconds=1e-3)
    return fastest.scaled(slowness, f"fake/{slowness:g}")


def initial_model(of: ModelSpec | None = None, seed: int = 0) -> dict[str, Array]:
    """Random values; variances are positive."""
    of = of or spec()
    model = {}
    for t in of.tensors:
        values = generator(seed, "init", t.name).normal(size=t.shape).astype(np.float32)
        model[t.name] = np.abs(values) + 1 if t.name.endswith("running_var") else values
    return model


@dataclass(frozen=True)
class FakeTrainer:
    """The Trainer port in numpy; what a client is, is its fields."""

    data_seed: int
    num_samples: int
    profile: TimingProfile
    classes: tuple[int, ...] = ()
    spec: ModelSpec = field(default_factory=spec)

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        job = Job(work, 2, seed, frozenset(), self.spec.exits_for(window.end, window.front), window.end)
        change = {}
        for t in self.spec.weights_in(window.end, window.front):
            step = -work.lr * self._gradient(t, model[t.name], model[t.name], job, 0, None)
            after = self._gradient(t, model[t.name] + step, model[t.name], job, 1, None)
            change[t.name] = float((after * step).sum())
        return change

    def train(self, model: Tensors, job: Job) -> Trained:
        patches, losses = {}, []
        for t in self.spec.tensors:
            where = self.narrowed(t, job.width)
            start = model[t.name] if where is None else model[t.name][where]
            if t.name in job.selected or (t.role is Role.EXIT and t.block in job.exits):
                values, loss = self._descend(t, start, job, where)
                patches[t.name] = Patch(values, where)
                losses.append(loss)
            elif t.role is Role.BUFFER and job.end <= t.block <= max(job.exits):
                patches[t.name] = Patch(self._statistics(t, start, job), where)
        loss = float(np.mean(losses)) if losses else 0.0
        return Trained(patches, _effective_steps(job), loss, loss_square=loss**2 * (1 + 1 / self.num_samples))

    def narrowed(self, t: TensorSpec, width: float) -> Where:
        """The first channels; the input of the model and its classes stay whole."""
        if width == 1:
            return None
        keep = [slice(0, math.ceil(width * size - 1e-9)) for size in t.shape]
        if ".linear." in t.name:
            keep[0] = slice(0, t.shape[0])
        if t.block == 1 and ".conv.weight" in t.name:
            keep[1] = slice(0, t.shape[1])
        return tuple(keep)

    def _descend(self, t: TensorSpec, start: Array, job: Job, where: Where) -> tuple[Array, float]:
        values, velocity, losses = start.astype(np.float64), np.zeros(start.shape), []
        for step in range(job.num_steps):
            gradient = self._gradient(t, values, start, job, step, where)
            norm = float(np.sqrt((gradient**2).sum()))
            if 0 < job.work.clip_norm < norm:
                gradient *= job.work.clip_norm / norm
            if job.work.optimiser == "adamw":
                gradient = np.sign(gradient)
            velocity = job.work.momentum * velocity + gradient
            losses.append(float((gradient**2).mean()))
            values = values - job.work.lr * (velocity + job.proximal * (values - start))
        if job.threshold is not None and t.name in maskable(self.spec):
            values = np.where(np.abs(start) >= job.threshold, values, start)
        return values.astype(np.float32), float(np.mean(losses))

    def _gradient(self, t: TensorSpec, values: Array, start: Array, job: Job, step: int, where: Where) -> Array:
        def part(full: Array) -> Array:
            return full if where is None else full[where]

        target = part(_normal(t.shape, self.data_seed, "target", t.name))
        noise = part(_normal(t.shape, job.seed, "noise", t.name, step))
        gradient = values - target + noise / math.sqrt(job.work.batch_size + 3 * self.num_samples)
        gradient *= sum(e >= t.block for e in job.exits) * (1 + job.distil + job.end / 100)
        gradient /= job.width if job.width_scaler else 1
        if job.masked_loss and self.classes and t.shape[0] == NUM_CLASSES:
            absent = np.setdiff1d(np.arange(NUM_CLASSES), self.classes)
            gradient[absent] = 0.0
        if job.threshold is not None and t.name in maskable(self.spec):
            gradient *= gradient_factor(values, job.threshold)
        gradient += job.work.weight_decay * values + job.dyn_alpha * (values - start)
        if job.dyn_alpha and t.name in job.dyn_drift:
            gradient -= part(job.dyn_drift[t.name])
        return np.asarray(gradient)

    def _statistics(self, t: TensorSpec, start: Array, job: Job) -> Array:
        seen = np.abs(generator(self.data_seed, "statistics", t.name, job.num_steps).normal(size=start.shape))
        mixed = seen if job.static_norm else 0.9 * start + 0.1 * seen
        return mixed.astype(np.float32)


@dataclass(frozen=True)
class Recorder(FakeTrainer):
    """Keeps the jobs it was given."""

    jobs: list[Job] = field(default_factory=list)

    def train(self, model: Tensors, job: Job) -> Trained:
        self.jobs.append(job)
        return super().train(model, job)


@dataclass(frozen=True)
class History:
    """What came of a run."""

    model: Tensors
    models: tuple[Tensors, ...]
    """The model at the start of each round."""
    plans: tuple[Plan, ...]
    updates: tuple[tuple[Update, ...], ...]
    memories: Mapping[str, Memory]
    budget_seconds: float

    @property
    def reports(self) -> list[Report]:
        return [update.report for updates in self.updates for update in updates]


def fleet(num_clients: int = 6, of: ModelSpec | None = None) -> dict[str, FakeTrainer]:
    """Clients that differ in speed (1 to 4 times slower), in the number of samples and in the classes."""
    of = of or spec()
    return {
        f"client-{i}": FakeTrainer(
            data_seed=derive(7, "data", i),
            num_samples=10 + 7 * i,
            profile=profile(1 + i % 4, of),
            classes=tuple(sorted({i % NUM_CLASSES, (i + 2) % NUM_CLASSES, (2 * i) % NUM_CLASSES})),
            spec=of,
        )
        for i in range(num_clients)
    }


def context_of(
    clients: Mapping[str, Trainer],
    round_num: int = 0,
    seed: int = 1,
    num_participants: int = 0,
    budget_seconds: float = 0.0,
    work: LocalWork = WORK,
    state: Mapping[str, Any] | None = None,
    last: Mapping[str, Report] | None = None,
) -> RoundContext:
    """What a plan gets to see of these clients; a budget of 0 is the fastest client's."""
    return RoundContext(
        round_num,
        seed,
        next(iter(clients.values())).spec,
        [ClientView(n, c.num_samples, c.profile, (last or {}).get(n)) for n, c in clients.items()],
        num_participants,
        budget_seconds or budget([c.profile for c in clients.values()], scope="backward"),
        work,
        state=state or {},
    )


def run_rounds(
    strategy: Strategy,
    num_rounds: int = 5,
    clients: Mapping[str, Trainer] | None = None,
    *,
    seed: int = 1,
    num_participants: int = 0,
    work: LocalWork = WORK,
    budget_seconds: float = 0.0,
    scope: str = "backward",
    backwards: bool = False,
) -> History:
    """Plan, fit, fold, round by round; the plan's state goes through JSON, as it does in a service.

    ``budget_seconds`` of 0 takes the fastest client's; ``backwards`` folds the updates last one first.
    """
    clients = clients or fleet()
    of = next(iter(clients.values())).spec
    budget_seconds = budget_seconds or budget([c.profile for c in clients.values()], scope=scope)
    model: Tensors = initial_model(of)
    state: Tensors = {}
    plan_state: dict[str, Any] = {}
    change: dict[str, float] = {}
    memories = dict.fromkeys(clients, Memory())
    last: dict[str, Report] = {}
    models, plans, rounds = [], [], []
    for round_num in range(num_rounds):
        context = context_of(clients, round_num, seed, num_participants, budget_seconds, work, plan_state, last)
        plan = strategy.plan(replace(context, global_importance=change))
        plan_state = json.loads(json.dumps(plan.state, allow_nan=False))
        updates = []
        for task in plan.tasks:
            update, memory = strategy.fit(task, model, memories[task.client], clients[task.client])
            seconds = update.report.cost.total(scope) * update.report.num_steps
            if plan.close_after_seconds is None or seconds <= plan.close_after_seconds:
                memories[task.client], last[task.client] = memory, update.report
                updates.append(update)
        fold = strategy.fold(of)
        for update in reversed(updates) if backwards else updates:
            fold.add(update)
        folded = fold.finish(model, state)
        change = global_change(folded.model, model)
        models.append(model)
        plans.append(plan)
        rounds.append(tuple(updates))
        model, state = folded.model, folded.state
    return History(model, tuple(models), tuple(plans), tuple(rounds), memories, budget_seconds)


def same_bits(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(one[n].tobytes() == other[n].tobytes() for n in one)


_NORM = {"weight": Role.WEIGHT, "bias": Role.WEIGHT, "running_mean": Role.BUFFER, "running_var": Role.BUFFER}


def _layer(name: str, block: int, shape: tuple[int, ...], role: Role) -> list[TensorSpec]:
    return [
        TensorSpec(f"{name}.weight", block, shape, role),
        TensorSpec(f"{name}.bias", block, shape[:1], role),
    ]


@lru_cache(maxsize=10_000)
def _normal(shape: tuple[int, ...], seed: int, *parts: str | int) -> Array:
    values = generator(seed, *parts).normal(size=shape)
    values.flags.writeable = False
    return values


def _effective_steps(job: Job) -> float:
    """FedNova's a_n for momentum: the sum of (1 - rho^j) / (1 - rho) over the steps j = 1, 2, ..."""
    rho = job.work.momentum
    return sum((1 - rho**j) / (1 - rho) for j in range(1, job.num_steps + 1))
