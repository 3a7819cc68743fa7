"""Where hooks are called: in which order, with which values, and what is left afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from fedel.data.dataset import Dataset
from fedel.models.blocks import BlockModel
from fedel.training.hooks import TorchTraining
from fedel.types import Hook, LocalWork, TimingProfile, Training, Value

from .toys import trainer_of, whole

WEIGHT = "blocks.one.conv.weight"


@dataclass(frozen=True)
class Diary(Hook):
    """Writes down where it is called."""

    name: str
    calls: list[str] = field(default_factory=list)

    def _note(self, call: str) -> None:
        self.calls.append(f"{self.name}.{call}")

    def reweighted(self) -> tuple[str, ...]:
        return (WEIGHT,)

    def used_weight(self, weight: Value) -> Value:
        self._note("used_weight")
        return weight

    def narrowed_output(self, output: Value) -> Value:
        self._note("narrowed_output")
        return output

    def logits(self, training: Training, logits: Value) -> Value:
        self._note("logits")
        return logits

    def loss(self, training: Training, loss: Value, logits: Sequence[Value], targets: Value) -> Value:
        self._note("loss")
        return loss

    def gradient(self, training: Training, name: str, gradient: Value) -> Value:
        if name == WEIGHT:
            self._note("gradient")
        return gradient

    def step(self, training: Training, take_step: Callable[[], None]) -> None:
        self._note("step")
        take_step()
        self._note("stepped")

    def finish(self, training: Training) -> None:
        self._note("finish")


def test_order(plain: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile) -> None:
    calls: list[str] = []
    hooks = (Diary("a", calls), Diary("b", calls))
    trainer_of(plain, data, profile).train(plain.tensors(), whole(plain, work, num_steps=1, hooks=hooks))
    first = calls.index("a.logits") - 2  # torch looks at the weights when they are registered, too
    forward = ["a.used_weight", "b.used_weight", "a.logits", "b.logits", "a.loss", "b.loss"]
    after = ["a.step", "b.step", "b.stepped", "a.stepped", "a.finish", "b.finish"]
    assert calls[first:] == [*forward, "a.gradient", "b.gradient", *after]


def test_outputs_of_narrower_layers(
    plain: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    hook = Diary("a")
    train_spec = whole(plain, work, num_steps=1, width=0.5, hooks=(hook,))
    trainer_of(plain, data, profile).train(plain.tensors(), train_spec)
    # Three convolutions have fewer channels; the classifier keeps its classes.
    assert hook.calls.count("a.narrowed_output") == 3


def test_hooks_that_change_nothing_leave_the_bits(
    normed: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    trainer, start = trainer_of(normed, data, profile), normed.tensors()
    for width in (1.0, 0.5):
        train_spec = whole(normed, work, width=width)
        one = trainer.train(start, train_spec).patches
        other = trainer.train(start, replace(train_spec, hooks=(Diary("a"),))).patches
        assert all(one[n].values.tobytes() == other[n].values.tobytes() for n in one)


@dataclass(frozen=True)
class Fails(Diary):
    def loss(self, training: Training, loss: Value, logits: Sequence[Value], targets: Value) -> Value:
        raise ZeroDivisionError


def test_a_hook_that_fails_leaves_the_model_usable(
    plain: BlockModel, data: Dataset, work: LocalWork, profile: TimingProfile
) -> None:
    trainer, start, train_spec = trainer_of(plain, data, profile), plain.tensors(), whole(plain, work)
    before = trainer.train(start, train_spec).patches
    with pytest.raises(ZeroDivisionError):
        trainer.train(start, replace(train_spec, hooks=(Fails("a"),)))
    assert not any("parametrizations" in name for name, _ in plain.named_parameters())
    after = trainer.train(start, train_spec).patches
    assert all(before[n].values.tobytes() == after[n].values.tobytes() for n in before)


def test_parts_are_cut_and_copied_once() -> None:
    model = {"w": np.arange(12, dtype=np.float32).reshape(3, 4)}
    model["w"].flags.writeable = False
    where = (slice(0, 2), slice(1, 3))
    training = TorchTraining(LocalWork(), {}, model, {"w": where}, torch.device("cpu"))
    assert training.start("w").tolist() == [[1.0, 2.0], [5.0, 6.0]]
    assert training.start("w") is training.start("w")
    assert training.part("w", model["w"] + 1).tolist() == [[2.0, 3.0], [6.0, 7.0]]
