"""Optimisers, always started fresh: building one, and its very first step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fedel.errors import ConfigError
from fedel.types import LocalWork

_ADAM_EPS = 1e-8


class Optimiser(Protocol):
    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


class SGD:
    """The step of ``torch.optim.SGD``, to the bit, without the bookkeeping around it: on a narrow network that
    takes longer than the step."""

    def __init__(self, parameters: Iterable[Tensor], work: LocalWork) -> None:
        self._parameters, self._work = list(parameters), work
        self._momenta: dict[int, Tensor | None] = {}
        """By place in the parameters; none for one that had no gradient so far."""

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        work, parameters = self._work, self._parameters
        moved = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        momenta = [self._momenta.get(i) for i in moved] if work.momentum else []
        sgd(
            [parameters[i] for i in moved],
            [parameters[i].grad for i in moved],  # type: ignore[misc]
            momenta,
            fused=True,
            foreach=False,
            weight_decay=work.weight_decay,
            momentum=work.momentum,
            lr=work.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        self._momenta |= zip(moved, momenta, strict=False)


def build(parameters: Iterable[Tensor], work: LocalWork) -> Optimiser:
    """Fused kernels: one pass over memory instead of one for each term of the update."""
    if work.optimiser == "sgd":
        return SGD(parameters, work)
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
