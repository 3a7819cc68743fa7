"""The models that the benchmark moves around: VGG16's shapes, one block per layer and an exit after each.

Nothing is trained: only the number, the shapes and the bytes of the tensors matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fedel.errors import ConfigError
from fedel.types import Array, ModelSpec, Role, TensorSpec

CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
NUM_EXIT_CLASSES = 10
_PIECE = 1 << 20
"""Values that are drawn; a tensor repeats them."""


@dataclass(frozen=True)
class Workload:
    name: str
    channels: tuple[int, ...]
    linear: tuple[tuple[int, int], ...]
    """Outputs and inputs of the last layers."""
    rounds: int
    """Rounds of one measurement, the first of which only warms up."""

    @property
    def spec(self) -> ModelSpec:
        return _spec(self)

    @property
    def num_bytes(self) -> int:
        return sum(t.num_bytes for t in self.spec.tensors)

    @property
    def shapes(self) -> list[list[int]]:
        return [list(t.shape) for t in self.spec.tensors]


def _narrow(part: int) -> tuple[int, ...]:
    return tuple(channels // part for channels in CHANNELS)


WORKLOADS = {
    "XS": Workload("XS", _narrow(32), ((16, 16), (16, 16), (10, 16)), 3),
    "S": Workload("S", _narrow(8), ((64, 64), (64, 64), (10, 64)), 9),
    "M": Workload("M", CHANNELS, ((512, 512), (512, 512), (10, 512)), 4),
    "L": Workload("L", CHANNELS, ((4096, 25088), (4096, 4096), (1000, 4096)), 3),
}
"""60 kB for tests, 1 MB, 61 MB (CIFAR-10's head) and 553 MB (ImageNet's head)."""


def workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise ConfigError(f"no workload is named '{name}'; there are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


@lru_cache
def _spec(of: Workload) -> ModelSpec:
    shapes: list[tuple[int, ...]] = [
        (after, before, 3, 3) for before, after in zip((3, *of.channels), of.channels, strict=False)
    ]
    shapes += of.linear
    tensors: list[TensorSpec] = []
    for block, shape in enumerate(shapes, start=1):
        tensors.append(TensorSpec(f"blocks.{block:02d}.weight", block, shape))
        tensors.append(TensorSpec(f"blocks.{block:02d}.bias", block, shape[:1]))
        if block < len(shapes):
            exit_shape = (NUM_EXIT_CLASSES, shape[0])
            tensors.append(TensorSpec(f"exits.{block:02d}.weight", block, exit_shape, Role.EXIT))
            tensors.append(TensorSpec(f"exits.{block:02d}.bias", block, exit_shape[:1], Role.EXIT))
    names = tuple(f"{block:02d}" for block in range(1, len(shapes) + 1))
    return ModelSpec(f"vgg16-{of.name}", names, tuple(tensors))


def values(of: Workload, seed: int) -> dict[str, Array]:
    """Small numbers of a normal distribution."""
    rng = np.random.default_rng(seed)
    piece: Any = rng.standard_normal(_PIECE, np.float32) * np.float32(0.05)
    return {t.name: np.resize(piece[: t.size], t.shape) for t in of.spec.tensors}
