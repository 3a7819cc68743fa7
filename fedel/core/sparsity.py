"""FIARSE's sub-models: the large weights of the model, whatever tensor they stand in (algorithms 10.2)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from fedel.types import ModelSpec, Tensors, Value


def maskable(spec: ModelSpec) -> tuple[str, ...]:
    """The weights a threshold may mask, in forward order: all but those of normalisation layers.

    A layer is the part of a tensor's name before the last dot. It normalises if it keeps running statistics,
    if its ``weight`` has one dimension, or if its ``weight`` and ``bias`` have the same shape (a layer norm
    over several dimensions): no convolution and no linear layer has any of the three.

    >>> from fedel.types import TensorSpec
    >>> shapes = {"conv.weight": (4, 3), "conv.bias": (4,), "bn.weight": (4,), "bn.bias": (4,)}
    >>> maskable(ModelSpec("toy", ("only",), tuple(TensorSpec(n, 1, s) for n, s in shapes.items())))
    ('conv.weight', 'conv.bias')
    """
    shapes = {t.name: t.shape for t in spec.tensors}

    def normalises(layer: str) -> bool:
        weight = shapes.get(f"{layer}.weight")
        if f"{layer}.running_mean" in shapes:
            return True
        return weight is not None and (len(weight) == 1 or weight == shapes.get(f"{layer}.bias"))

    return tuple(t.name for t in spec.weights if not normalises(t.name.rpartition(".")[0]))


def magnitude_threshold(model: Tensors, names: Iterable[str], share: float) -> float:
    """Theta: the magnitude that a ``share`` of all values of these tensors, taken together, reach.

    It is the ``int(share * d)``-th largest of d magnitudes; at least one value is always kept.

    >>> model = {"a": np.array([4.0, -1.0]), "b": np.array([[-3.0, 2.0]])}
    >>> [magnitude_threshold(model, ["a", "b"], share) for share in (1.0, 0.5, 0.01)]
    [1.0, 3.0, 4.0]
    """
    magnitudes = np.concatenate([np.abs(model[name]).ravel() for name in names])
    rank = magnitudes.size - max(1, int(share * magnitudes.size))
    return float(np.partition(magnitudes, rank)[rank])


def gradient_factor(weights: Value, threshold: float) -> Value:
    """By what the gradient of each weight is multiplied: 0 below the threshold, 1.5 at it, 1 far above.

    Operators only, so that it takes torch's tensors as well as numpy's arrays.

    >>> gradient_factor(np.array([0.5, -1.0, 3.0]), 1.0).tolist()
    [0.0, 1.5, 1.375]
    """
    size = abs(weights)
    if threshold == 0:  # nothing is masked, and the formula is 0 / 0 at a weight of 0
        return size * 0 + 1
    return (size >= threshold) * (1 + 2 * size * threshold / (size + threshold) ** 2)
