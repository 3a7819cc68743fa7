"""Optimisers, always started fresh: building one, and its very first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fedel.errors import ConfigError
from fedel.types import LocalWork

_ADAM_EPS = 1e-8


def build(parameters: Iterable[Tensor], work: LocalWork) -> torch.optim.Optimizer:
    """Fused kernels: one pass over memory instead of one for each term of the update."""
    if work.optimiser == "sgd":
        return torch.optim.SGD(
            parameters, lr=work.lr, momentum=work.momentum, weight_decay=work.weight_decay, fused=True
        )
    if work.optimiser == "adamw":
        return torch.optim.AdamW(
            parameters, lr=work.lr, weight_decay=work.weight_decay, eps=_ADAM_EPS, fused=True
        )
    raise ConfigError(f"optimiser '{work.optimiser}' is not known; set work.optimiser to sgd or adamw")


def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale gradients down together when their common norm is above ``max_norm``; 0 switches it off."""
    if max_norm > 0 and gradients:
        norm = torch.stack([torch.linalg.vector_norm(g) for g in gradients]).norm()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for g in gradients:
            g.mul_(factor)


def first_step(weight: Tensor, gradient: Tensor, work: LocalWork) -> Tensor:
    """What a fresh optimiser adds to ``weight`` in its first step: momentum is the gradient itself."""
    if work.optimiser == "adamw":
        return -work.lr * (gradient / (gradient.abs() + _ADAM_EPS) + work.weight_decay * weight)
    return -work.lr * (gradient + work.weight_decay * weight)
