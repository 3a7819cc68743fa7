"""Where a strategy's hooks meet torch: what they see of a training, and the places where they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedel.models.blocks import BlockModel
from fedel.training.objective import objective
from fedel.types import Array, Hook, LocalWork, Tensors, Where


class TorchTraining:
    """The ``Training`` that hooks see: the weights of one elastic model, and the values it started from."""

    def __init__(
        self,
        work: LocalWork,
        weights: Mapping[str, Tensor],
        model: Tensors,
        where: Mapping[str, Where],
        device: torch.device,
    ) -> None:
        self.work, self.weights = work, weights
        self._model, self._where, self._device = model, where, device
        self._parts: dict[tuple[str, int], Tensor] = {}

    def start(self, name: str) -> Tensor:
        return self.part(name, self._model[name])

    def part(self, name: str, values: Array) -> Tensor:
        """Copied to the device once, however often it is used."""
        key = (name, id(values))
        if key not in self._parts:
            where = self._where.get(name)
            cut = np.array(values if where is None else values[where], dtype=np.float32)
            self._parts[key] = torch.from_numpy(cut).to(self._device)
        return self._parts[key]

    def index(self, places: Array) -> Tensor:
        return torch.from_numpy(np.asarray(places, dtype=np.int64)).to(self._device)


def loss_of(
    hooks: Sequence[Hook], training: TorchTraining, logits: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and each sample's cross-entropy averaged over the exits."""
    for hook in hooks:
        logits = [hook.logits(training, z) for z in logits]
    loss, each = objective(logits, y)
    for hook in hooks:
        loss = hook.loss(training, loss, logits, y)
    return loss, each


def change_gradients(hooks: Sequence[Hook], training: TorchTraining) -> None:
    for hook in hooks:
        for name, weight in training.weights.items():
            if weight.grad is not None:
                weight.grad = hook.gradient(training, name, weight.grad)


def take_step(hooks: Sequence[Hook], training: TorchTraining, step: Callable[[], object]) -> None:
    """One step of the optimiser inside every hook's ``step``, the first hook outermost."""
    if hooks:
        hooks[0].step(training, partial(take_step, hooks[1:], training, step))
    else:
        step()


class _Reweighted(nn.Module):
    def __init__(self, hook: Hook) -> None:
        super().__init__()
        self.hook = hook

    def forward(self, weight: Tensor) -> Tensor:
        used: Tensor = self.hook.used_weight(weight)
        return used


@contextmanager
def reweighted(model: BlockModel, hooks: Sequence[Hook]) -> Iterator[None]:
    """Inside, layers compute with the weights that hooks make of theirs; parameters stay as they are."""
    changed: dict[str, tuple[nn.Module, str]] = {}
    for hook in hooks:
        for tensor in hook.reweighted():
            layer, _, name = tensor.rpartition(".")
            changed[tensor] = module, name = model.get_submodule(layer), name
            parametrize.register_parametrization(module, name, _Reweighted(hook))
    try:
        yield
    finally:
        for module, name in changed.values():
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)


def narrowed_layers(full: BlockModel, narrow: BlockModel, hooks: Sequence[Hook]) -> dict[nn.Module, Any]:
    """What the output of every layer with fewer channels than in the full model goes through."""
    if narrow is full or not hooks:
        return {}
    whole = full.spec.by_name
    return {
        narrow.get_submodule(t.name.removesuffix(".weight")): partial(_narrowed_output, hooks)
        for t in narrow.spec.weights
        if t.name.endswith(".weight") and len(t.shape) > 1 and t.shape[0] < whole[t.name].shape[0]
    }


def _narrowed_output(hooks: Sequence[Hook], output: Tensor) -> Tensor:
    for hook in hooks:
        output = hook.narrowed_output(output)
    return output
