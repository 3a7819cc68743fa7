"""How much each tensor matters, to this client and to the federation (paper, section 4.2; A6 to A10).

Local importance is ElasticTrainer's: the further loss change along a trial step, sign turned so that
helpful is positive. Global importance is how far the federation moved the tensor in the last round. Each
is divided by its own largest value within the window before they are blended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fedel.types import Tensors

_CHUNK = 1 << 16


def local(loss_change: Mapping[str, float]) -> dict[str, float]:
    """Importance from ``<g1, dw>`` of a trial step; helpful tensors (negative change) come out positive.

    >>> local({"a": -4.0, "b": 1.0})
    {'a': 1.0, 'b': -0.25}

    A probe that says nothing (all zero, or not finite) makes every tensor equally important.

    >>> local({"a": 0.0, "b": 0.0})
    {'a': 1.0, 'b': 1.0}
    """
    largest = max((abs(v) for v in loss_change.values()), default=0.0)
    if largest == 0 or not all(math.isfinite(v) for v in loss_change.values()):
        return dict.fromkeys(loss_change, 1.0)
    return {name: -change / largest for name, change in loss_change.items()}


def global_change(model: Tensors, previous: Tensors) -> dict[str, float]:
    """``||w_r - w_{r-1}||^2`` of each tensor: computed once on the server, one float a tensor on the wire.

    The paper divides by the learning rate; that factor cancels when ``blend`` normalises.

    >>> q = global_change({"w": np.array([0.1, -0.2])}, {"w": np.zeros(2)})
    >>> round(q["w"] / 0.1, 6)
    0.5
    """
    change = {}
    for name, values in model.items():
        new, old, total = values.reshape(-1), previous[name].reshape(-1), 0.0
        # In chunks, so that the float64 difference stays in the cache.
        for start in range(0, new.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            difference = np.subtract(new[part], old[part], dtype=np.float64)
            total += float(difference @ difference)
        change[name] = total
    return change


def blend(
    local_importance: Mapping[str, float], global_importance: Mapping[str, float], beta: float
) -> dict[str, float]:
    """``beta * local + (1 - beta) * global`` over the window's tensors.

    >>> blend({"a": 1.0, "b": -0.5}, {"a": 2.0, "b": 8.0}, beta=0.5)
    {'a': 0.625, 'b': 0.25}

    In round 0, or when nothing in the window moved, only the local importance counts.

    >>> blend({"a": 1.0, "b": -0.5}, {}, beta=0.6)
    {'a': 1.0, 'b': -0.5}
    """
    largest = max((global_importance.get(name, 0.0) for name in local_importance), default=0.0)
    if largest <= 0 or not math.isfinite(largest):
        return dict(local_importance)
    return {
        name: beta * mine + (1 - beta) * global_importance.get(name, 0.0) / largest
        for name, mine in local_importance.items()
    }
