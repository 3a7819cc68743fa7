"""The losses: cross-entropy at every exit used, and DepthFL's mutual distillation between them."""

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
    rows = len(y)
    per_sample = each.detach().reshape(rows, -1).sum(1) / counted.reshape(rows, -1).sum(1).clamp(min=1)
    return mean, per_sample


def mutual_distillation(logits: Sequence[Tensor]) -> Tensor:
    """Each exit learns from the others' predictions, which are held fixed (DepthFL; temperature 1)."""
    students = [F.log_softmax(z.flatten(0, -2), dim=-1) for z in logits]
    # DepthFL adds 1e-7 so that the logarithm of a prediction of zero stays finite.
    teachers = [s.detach().exp() + 1e-7 for s in students]
    total = students[0].new_zeros(())
    for i, student in enumerate(students):
        for j, teacher in enumerate(teachers):
            if i != j:
                total = total + F.kl_div(student, teacher, reduction="batchmean") / (len(logits) - 1)
    return total


def objective(
    logits: Sequence[Tensor], y: Tensor, distil: float = 0.0, present: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The loss to minimise, and each sample's cross-entropy averaged over the exits.

    ``present`` marks the classes the client holds; logits of the others are set to zero (HeteroFL).
    """
    if present is not None:
        logits = [z.masked_fill(~present, 0.0) for z in logits]
    losses = [cross_entropy(z, y) for z in logits]
    loss = torch.stack([mean for mean, _ in losses]).sum() if len(losses) > 1 else losses[0][0]
    if distil:
        loss = loss + distil * mutual_distillation(logits)
    return loss, torch.stack([each for _, each in losses]).mean(0)
