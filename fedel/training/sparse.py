"""FIARSE's threshold: the model is its large weights, found anew in every forward pass (FIARSE, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fedel.core.sparsity import maskable
from fedel.models.blocks import BlockModel


class _Keep(torch.autograd.Function):
    """w * [|w| >= theta], with the gradient that makes magnitude become importance."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, threshold: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.threshold = threshold
        return weight * (weight.abs() >= threshold)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        size, theta = weight.abs(), ctx.threshold
        # 0 / 0 where both are zero; the factor is 1 then.
        factor = 1 + torch.nan_to_num(2 * size * theta / (size + theta) ** 2)
        return gradients[0] * (size >= theta) * factor, None


class _Threshold(nn.Module):
    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, weight: Tensor) -> Tensor:
        kept: Tensor = _Keep.apply(weight, self.threshold)  # type: ignore[no-untyped-call]
        return kept


def masked_tensors(model: BlockModel) -> list[tuple[str, nn.Module, str]]:
    """Tensor name, its layer and its name there, of everything the threshold masks; early exits are not."""
    places = [(tensor, *tensor.rpartition(".")) for tensor in maskable(model.spec)]
    return [(tensor, model.get_submodule(layer), name) for tensor, layer, _, name in places]


@contextmanager
def thresholded(model: BlockModel, threshold: float | None) -> Iterator[None]:
    """Inside, layers compute with their large weights only; parameters stay as they are."""
    masked = [] if threshold is None else masked_tensors(model)
    for _, module, name in masked:
        parametrize.register_parametrization(module, name, _Threshold(threshold or 0.0))
    try:
        yield
    finally:
        for _, module, name in masked:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
