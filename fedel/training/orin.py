"""Profiles of a Jetson Orin from published figures, for when no device is at hand (paper, section 5.1).

The figures are TensorFlow's, batch 4, so three things are inferred: Keras gives ResNet50's convolutions a
bias, whose time is added to the kernel; a norm's tensors are free to update and the way through is charged
to its shift, as in ElasticTrainer; and early exits, which were not measured, are taken to cost what the
network's own classifier does, which reads at least as many features as the exits do by default. VGG16 was
measured without batch norm; with it, the norms are taken to cost nothing. Narrowed models were not measured
either: ``widths`` is empty.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedel.errors import ProfileError
from fedel.training.orin_data import RESNET50_32, RESNET50_224, VGG16_32, VGG16_224, Row
from fedel.types import BlockTime, ModelSpec, TensorSpec, TensorTime, TimingProfile

_TABLES = {
    ("vgg16", 32): VGG16_32,
    ("vgg16", 224): VGG16_224,
    ("resnet50", 32): RESNET50_32,
    ("resnet50", 224): RESNET50_224,
}
_BATCH_SIZE = 4
_MICRO = 1e-6


def orin_profile(spec: ModelSpec, model: str, input_size: int = 32) -> TimingProfile:
    """The profile of ``vgg16`` or ``resnet50``, for images of 32 or 224 pixels.

    ``spec`` gives the tensors' names; a model of another width has the same, though not the same times.
    """
    table = _TABLES.get((model, input_size))
    if table is None:
        known = ", ".join(f"{name} at {size}" for name, size in _TABLES)
        raise ProfileError(f"no Orin figures for {model} at {input_size} pixels; there are {known}")
    layers = _layers(spec)
    if len(layers) != len(table) or any(
        len(t) not in _tensors_in(model, i, table) for i, t in enumerate(layers)
    ):
        raise ProfileError(
            f"model {spec.name} does not have the {len(table)} layers of the {model} that was measured on the"
            " Orin; run `fedel profile` for this one"
        )
    forward = [0.0] * spec.num_blocks
    tensors: list[TensorTime] = []
    for layer, row in zip(layers, table, strict=True):
        forward[layer[0].block - 1] += row[4] * _MICRO
        tensors += _times(layer, row)
    head = table[-1]
    exit_backward = sum(head[:3]) * _MICRO
    blocks = [BlockTime(f, head[4] * _MICRO, exit_backward) for f in forward[:-1]]
    return TimingProfile(
        device="jetson-orin",
        model=spec.name,
        batch_size=_BATCH_SIZE,
        tensors=tuple(tensors),
        blocks=(*blocks, BlockTime(forward[-1])),
        source=f"published Jetson Orin kernel times, {model} at {input_size}x{input_size}, exits estimated",
    )


def _layers(spec: ModelSpec) -> list[list[TensorSpec]]:
    """Weights by layer: a kernel opens one, and its bias or the norm after it belong to it."""
    layers: list[list[TensorSpec]] = []
    for t in spec.weights:
        if len(t.shape) > 1 or not layers:
            layers.append([])
        layers[-1].append(t)
    return layers


def _tensors_in(model: str, index: int, table: Sequence[Row]) -> tuple[int, ...]:
    """Kernel and bias, or kernel, scale and shift, or all four."""
    if index == len(table) - 1:
        return (2,)
    return (3,) if model == "resnet50" else (2, 4)


def _times(layer: Sequence[TensorSpec], row: Row) -> list[TensorTime]:
    kernel, bias, grad, after, _ = (value * _MICRO for value in row)
    updates = {2: [kernel, bias], 3: [kernel + bias, 0.0, 0.0], 4: [kernel, bias, 0.0, 0.0]}[len(layer)]
    grads = [grad, *[0.0] * (len(layer) - 2), after]
    return [TensorTime(t.name, t.block, g, u) for t, g, u in zip(layer, grads, updates, strict=True)]
