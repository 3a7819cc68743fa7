"""Local steps: FedNova's count of them (FedNova, section 4; algorithms 12), and a short last one."""

from __future__ import annotations

import math

from fedel.types import LocalWork, ModelSpec, Role

MIN_SHARE = 1 / 8
"""Of a batch, the least that is worth a step: the fewer samples, the less does their gradient say."""


def least_samples(spec: ModelSpec) -> int:
    """Batch norm cannot normalise a single sample."""
    return 2 if any(t.role is Role.BUFFER for t in spec.tensors) else 1


def part_of_batch(left: float, batch_size: int, least: int = 1) -> float:
    """The share of a batch for which ``left`` of a step's time pays, in whole samples; 0 if they are too few.

    >>> [part_of_batch(left, 32) for left in (1.7, 0.5, 0.13, 0.12)]
    [1.0, 0.5, 0.125, 0.0]
    >>> [part_of_batch(left, 4, least=2) for left in (0.8, 0.7, 0.4)]
    [0.75, 0.5, 0.0]
    """
    share = math.floor(min(left, 1.0) * batch_size) / batch_size
    return share if share >= least_part(batch_size, least) else 0.0


def least_part(batch_size: int, least: int = 1) -> float:
    """The least share of a batch that is worth a step, in whole samples.

    >>> least_part(32), least_part(4), least_part(4, least=2), least_part(1, least=2)
    (0.125, 0.25, 0.5, 1.0)
    """
    return min(1.0, max(least, math.ceil(MIN_SHARE * batch_size)) / batch_size)


def shortened(batch_samples: int, share: float, least: int = 1) -> int:
    """Samples of a batch of this many that a step on a ``share`` of it takes.

    >>> shortened(32, 0.125), shortened(32, 1.0), shortened(3, 0.125, least=2)
    (4, 32, 2)
    """
    return min(batch_samples, max(least, round(share * batch_samples)))


def effective_steps(num_steps: int, work: LocalWork, proximal: float = 0.0) -> float:
    """FedNova's a_n: the l1 norm of the weights with which local steps enter the final update.

    ``proximal`` is FedProx's mu, which shrinks what earlier steps did.

    >>> round(effective_steps(3, LocalWork(momentum=0.9)), 6)
    5.61
    >>> effective_steps(3, LocalWork(momentum=0.0))
    3.0
    """
    momentum = work.momentum if work.optimiser == "sgd" else 0.0
    shrink = work.lr * proximal
    total = counter = 0.0
    for _ in range(num_steps):
        if momentum:
            counter = momentum * counter + 1
            total += counter
        if shrink:
            total = total * (1 - shrink) + 1
        if not momentum and not shrink:
            total += 1
    return total
