"""The loss of a batch: cross-entropy at every exit used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedel.data.dataset import IGNORE


def cross_entropy(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over all targets, and the mean of each sample (without gradient).

    Classes: logits (N, C), targets (N). Tokens: logits (N, L, V), targets (N, L); a target of -100 does
    not count.
    """
    each = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=IGNORE, reduction="none").view_as(y)
    counted = y != IGNORE
    mean = each.sum() / counted.sum().clamp(min=1)
    if y.ndim == 1:
        return mean, each.detach()
    rows = len(y)
    per_sample = each.detach().reshape(rows, -1).sum(1) / counted.reshape(rows, -1).sum(1).clamp(min=1)
    return mean, per_sample


def objective(logits: Sequence[Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the exits' losses, and each sample's cross-entropy averaged over the exits."""
    losses = [cross_entropy(z, y) for z in logits]
    if len(losses) == 1:
        return losses[0]
    return torch.stack([mean for mean, _ in losses]).sum(), torch.stack([each for _, each in losses]).mean(0)
