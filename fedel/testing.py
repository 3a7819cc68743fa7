"""A trainer without torch, and a fleet of such clients that differ in everything: for tests of methods.

Each client pulls every tensor towards a target of its own, by noisy gradient steps. There is no forward pass,
but every field of a ``TrainSpec``, every hook and every client moves the result: what is lost on the way from
a plan to a trainer shows in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from fedel.core.steps import effective_steps
from fedel.errors import ModelError
from fedel.seeds import derive, generator
from fedel.types import (
    Array,
    BlockBytes,
    BlockTime,
    Hook,
    LocalWork,
    MemoryUse,
    ModelSpec,
    Patch,
    Role,
    Tensors,
    TensorSpec,
    TensorTime,
    TimingProfile,
    Trained,
    TrainSpec,
    Value,
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


def memory_use(of: ModelSpec | None = None, limit_bytes: int = 0) -> MemoryUse:
    """Shallow blocks keep the larger activations, as in a convolutional network."""
    last = (of or spec()).num_blocks
    blocks = tuple(BlockBytes(1000 * (last + 1 - block), 500, 500, 250, 100) for block in range(1, last + 1))
    return MemoryUse(1000, 50, 1, blocks, limit_bytes)


def initial_model(of: ModelSpec | None = None, seed: int = 0) -> dict[str, Array]:
    """Random values; variances are positive."""
    of = of or spec()
    model = {}
    for t in of.tensors:
        values = generator(seed, "init", t.name).normal(size=t.shape).astype(np.float32)
        model[t.name] = np.abs(values) + 1 if t.name.endswith("running_var") else values
    return model


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


class Values(np.ndarray[Any, Any]):
    """A numpy array with the methods of torch's tensors that hooks use where an operator will not do."""

    def add(self, other: Value, alpha: float = 1) -> Value:
        return self + alpha * other

    def sub(self, other: Value, alpha: float = 1) -> Value:
        return self - alpha * other

    def where(self, condition: Value, other: Value) -> Value:
        return np.where(condition, self, other).view(Values)

    def copy_(self, other: Value) -> Value:
        self[...] = other
        return self

    def add_(self, other: Value, alpha: float = 1) -> Value:
        return self.copy_(self.add(other, alpha))

    def sub_(self, other: Value, alpha: float = 1) -> Value:
        return self.copy_(self.sub(other, alpha))

    def mul_(self, other: Value) -> Value:
        return self.copy_(self * other)


@dataclass(frozen=True)
class FakeTraining:
    """What hooks see: one tensor, because the fake trainer trains them one after the other."""

    work: LocalWork
    weights: Mapping[str, Values]
    model: Tensors
    where: Where

    def start(self, name: str) -> Array:
        return self.part(name, self.model[name])

    def part(self, name: str, values: Array) -> Array:  # noqa: ARG002
        return values if self.where is None else values[self.where]

    def index(self, places: Array) -> Array:
        return places


@dataclass(frozen=True)
class FakeTrainer:
    """The Trainer port in numpy; what a client is, is its fields."""

    data_seed: int
    num_samples: int
    profile: TimingProfile
    classes: tuple[int, ...] = ()
    spec: ModelSpec = field(default_factory=spec)

    @property
    def same_inputs(self) -> bool:
        return False

    def profile_again(self) -> bool:
        return False

    def probe(self, model: Tensors, window: Window, work: LocalWork, seed: int) -> Mapping[str, float]:
        train_spec = TrainSpec(
            work, 2, seed, frozenset(), self.spec.exits_for(window.end, window.front), window.end
        )
        change, model = {}, self._used(model, train_spec)
        for t in self.spec.weights_in(window.end, window.front):
            step = -work.lr * self._gradient(t, model[t.name], train_spec, 0, None)
            after = self._gradient(t, model[t.name] + step, train_spec, 1, None)
            change[t.name] = float((after * step).sum())
        return change

    def train(self, model: Tensors, train_spec: TrainSpec) -> Trained:
        patches, losses, model = {}, [], self._used(model, train_spec)
        num_steps, last_share = 0, 1.0
        while share := train_spec.next_share(num_steps):
            num_steps, last_share = num_steps + 1, share
        train_spec = replace(train_spec, num_steps=num_steps, last_share=last_share)
        for t in self.spec.tensors:
            where = self.narrowed(t, train_spec.width)
            if t.name in train_spec.selected or (t.role is Role.EXIT and t.block in train_spec.exits):
                values, loss = self._descend(t, model, train_spec, num_steps, where)
                patches[t.name] = Patch(values, where)
                losses.append(loss)
            elif t.role is Role.BUFFER and train_spec.end <= t.block <= max(train_spec.exits):
                start = model[t.name] if where is None else model[t.name][where]
                patches[t.name] = Patch(self._statistics(t, start, train_spec, num_steps), where)
        loss = float(np.mean(losses)) if losses else 0.0
        steps = effective_steps(num_steps, train_spec.work)
        square = loss**2 * (1 + 1 / self.num_samples)
        return Trained(patches, num_steps, steps, loss, square, last_share=last_share)

    def _used(self, model: Tensors, train_spec: TrainSpec) -> dict[str, Array]:
        """What runs: all of it has to be given, as in real training, and nothing else is looked at."""
        used = self.spec.tensors_for(train_spec.exits)
        if missing := sorted(used - model.keys()):
            raise ModelError(
                f"tensor '{missing[0]}' is missing among the {len(model)} given, and {len(missing) - 1} others:"
                " name in tensors_needed what a method's fit uses"
            )
        return {name: model[name] for name in used}

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

    def _descend(
        self, t: TensorSpec, model: Tensors, train_spec: TrainSpec, num_steps: int, where: Where
    ) -> tuple[Array, float]:
        work, hooks = train_spec.work, train_spec.hooks
        start = model[t.name] if where is None else model[t.name][where]
        values = start.astype(np.float64).view(Values)
        training = FakeTraining(work, {t.name: values}, model, where)
        velocity, losses = np.zeros(start.shape), []
        for step in range(num_steps):
            gradient: Value = self._gradient(t, values, train_spec, step, where).view(Values)
            for hook in hooks:
                gradient = hook.gradient(training, t.name, gradient)
            norm = float(np.sqrt((gradient**2).sum()))
            if 0 < work.clip_norm < norm:
                gradient *= work.clip_norm / norm
            if work.optimiser == "adamw":
                gradient = np.sign(gradient)
            velocity = work.momentum * velocity + gradient
            losses.append(float((gradient**2).mean()))
            _take_step(hooks, training, partial(values.sub_, velocity, alpha=work.lr))
        for hook in hooks:
            hook.finish(training)
        return np.asarray(values).astype(np.float32), float(np.mean(losses))

    def _gradient(self, t: TensorSpec, values: Array, train_spec: TrainSpec, step: int, where: Where) -> Array:
        def part(full: Array) -> Array:
            return full if where is None else full[where]

        work = train_spec.work
        target = part(_normal(t.shape, self.data_seed, "target", t.name))
        noise = part(_normal(t.shape, train_spec.seed, "noise", t.name, step))
        share = train_spec.last_share if step == train_spec.num_steps - 1 else 1.0
        gradient = values - target + noise / math.sqrt(share * work.batch_size + 3 * self.num_samples)
        gradient *= sum(e >= t.block for e in train_spec.exits) * (1 + train_spec.end / 100)
        for hook in train_spec.hooks:
            gradient *= _trace(hook)
        return np.asarray(gradient + work.weight_decay * values)

    def _statistics(self, t: TensorSpec, start: Array, train_spec: TrainSpec, num_steps: int) -> Array:
        seen = generator(self.data_seed, "statistics", t.name, num_steps).normal(size=start.shape)
        mixed = np.abs(seen) if train_spec.static_norm else 0.9 * start + 0.1 * np.abs(seen)
        return mixed.astype(np.float32)


def _trace(hook: Hook) -> float:
    """There is no forward pass and no loss here: a hook that changes them leaves a factor of its own."""
    forward = ("used_weight", "narrowed_output", "logits", "loss")
    if all(getattr(type(hook), name) is getattr(Hook, name) for name in forward):
        return 1.0
    return 1 + derive(0, repr(hook)) % 1000 / 1e4


def _take_step(hooks: Sequence[Hook], training: FakeTraining, step: Callable[[], Any]) -> None:
    if hooks:
        hooks[0].step(training, partial(_take_step, hooks[1:], training, step))
    else:
        step()


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
