"""Models of any size, with as many tensors as asked for, and how long a made-up device takes for each."""

from __future__ import annotations

import numpy as np

from fedel.types import Array, BlockTime, ModelSpec, Role, TensorSpec, TensorTime, TimingProfile

TENSORS_OF_BLOCK = 10
"""Eight weights, and an exit of two tensors."""


def made_up_spec(num_tensors: int, num_bytes: int) -> ModelSpec:
    """A model of about ``num_bytes``, spread evenly over ``num_tensors`` (a multiple of ten).

    >>> spec = made_up_spec(20, 100_000)
    >>> len(spec.tensors), spec.num_blocks, spec.num_bytes
    (20, 2, 100000)
    """
    num_blocks = num_tensors // TENSORS_OF_BLOCK
    values = max(1, num_bytes // 4 // num_tensors)
    tensors = []
    for block in range(1, num_blocks + 1):
        names = [f"blocks.{block}.{place}.weight" for place in range(TENSORS_OF_BLOCK - 2)]
        tensors += [TensorSpec(name, block, (values,)) for name in names]
        role = Role.EXIT if block < num_blocks else Role.WEIGHT
        head = "exits" if block < num_blocks else "blocks"
        tensors += [
            TensorSpec(f"{head}.{block}.linear.{part}", block, (values,), role) for part in ("weight", "bias")
        ]
    return ModelSpec("made-up", tuple(str(block) for block in range(1, num_blocks + 1)), tuple(tensors))


def made_up_profile(spec: ModelSpec, step_seconds: float = 1e-3) -> TimingProfile:
    """Every tensor takes the same time."""
    each = step_seconds / len(spec.weights) / 2
    times = tuple(TensorTime(t.name, t.block, each, each) for t in spec.weights)
    return TimingProfile("light", spec.name, 32, times, (BlockTime(1e-5),) * spec.num_blocks)


def made_up_model(spec: ModelSpec, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {t.name: rng.standard_normal(t.shape, dtype=np.float32) for t in spec.tensors}
