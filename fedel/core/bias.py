"""O1, the bias that training unequal parts of the model adds to the convergence bound (paper, theorem 1).

``O1 = sum over clients of (K * max_k c_nk - sum_k c_nk)`` with ``c_nk`` the weight of client n in tensor k
and K tensors (A25: tensors, not scalars; heads are not counted; 0 where nobody trained the tensor).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def o1(selected: Sequence[Collection[str]], tensors: Sequence[str]) -> float:
    """O1 of one round, from the tensors that each client trained; 0 when everybody trains everything.

    >>> o1([{"a", "b"}, {"a"}], ["a", "b"])
    1.0
    >>> o1([{"a", "b"}, {"a", "b"}], ["a", "b"])
    0.0
    """
    count = {name: sum(name in chosen for chosen in selected) for name in tensors}
    total = 0.0
    for chosen in selected:
        weights = [1 / count[name] if name in chosen else 0.0 for name in tensors]
        total += len(tensors) * max(weights, default=0.0) - sum(weights)
    return total
