"""FedNova's count of local steps (FedNova, section 4; algorithms 12)."""

from __future__ import annotations

from fedel.types import LocalWork


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
