"""What a model is to a method: blocks, tensors, windows of blocks, and changes of tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = Mapping[str, Array]
"""Tensor name -> values."""

Where = tuple[Any, ...] | NDArray[np.bool_] | None
"""The part of a tensor that a patch covers: ``None`` is all of it, else anything numpy can index with."""


class Role(Enum):
    """What training does with a tensor."""

    WEIGHT = "weight"
    """Trainable, chosen (or not) by a strategy."""
    EXIT = "exit"
    """Belongs to the early exit after its block: trained whenever that exit is used."""
    BUFFER = "buffer"
    """Not trained but changed by training: batch-norm statistics."""
    FROZEN = "frozen"
    """Never changes: the pretrained trunk of ALBERT in mode ``frozen``."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, block and shape of one tensor of the model."""

    name: str
    block: int
    shape: tuple[int, ...]
    role: Role = Role.WEIGHT
    dtype: str = "float32"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def in_exit(self) -> bool:
        """Whether it belongs to the exit after its block: also statistics, and heads that count as weights."""
        return self.role is Role.EXIT or self.name.startswith("exits.")


@dataclass(frozen=True)
class ModelSpec:
    """What a strategy knows about a model: its blocks and its tensors, in forward order."""

    name: str
    block_names: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    stages: tuple[int, ...] = ()
    """Blocks after which the network changes resolution; DepthFL cuts at these depths. The last is B."""
    exit_each: bool = False
    """Each block trains through its own exit (a frozen trunk), instead of one loss at the deep end."""
    inner_exits: frozenset[int] = frozenset()
    """Exits that train wherever a window has them inside, besides the one at its front; a method's choice, not
    sent."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_names)

    @cached_property
    def weights(self) -> tuple[TensorSpec, ...]:
        """The tensors a strategy chooses from."""
        return tuple(t for t in self.tensors if t.role is Role.WEIGHT)

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        return {t.name: t for t in self.tensors}

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole model on the wire."""
        return 4 * sum(t.size for t in self.tensors)

    @cached_property
    def exit_sizes(self) -> tuple[int, ...]:
        """Number of values in the exit after each block; 0 where there is none."""
        blocks = range(1, self.num_blocks + 1)
        return tuple(sum(t.size for t in self.tensors if t.in_exit and t.block == b) for b in blocks)

    def weights_in(self, end: int, front: int) -> tuple[TensorSpec, ...]:
        """The weights of blocks ``end`` to ``front``, both included."""
        return tuple(t for t in self.weights if end <= t.block <= front)

    def exits_for(self, end: int, front: int) -> tuple[int, ...]:
        """The exits through which blocks ``end`` to ``front`` train."""
        if self.exit_each:
            return tuple(range(end, front + 1))
        return (*(b for b in range(end, front) if b in self.inner_exits), front)

    def tensors_for(self, exits: Collection[int]) -> frozenset[str]:
        """The tensors that a training through these exits uses: of all blocks up to the last of them, and of
        no other exit. Frozen ones belong to the first block that uses them; later ones may share them."""
        last = max(exits)
        return frozenset(
            t.name
            for t in self.tensors
            if t.block <= last and (t.role is Role.FROZEN or t.block in exits or not t.in_exit)
        )

    def subset(self, names: Collection[str]) -> ModelSpec:
        """The same model with some of its tensors, as one of several aggregators keeps it."""
        return replace(self, tensors=tuple(t for t in self.tensors if t.name in names))

    @cached_property
    def digest(self) -> str:
        """A short hash of the tensors: two models with the same digest can exchange updates."""
        manifest = [[t.name, t.block, list(t.shape), t.role.value, t.dtype] for t in self.tensors]
        return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Window:
    """The blocks ``end`` to ``front`` (both included) a client trains; the front is the deep side."""

    end: int
    front: int

    def __contains__(self, block: int) -> bool:
        return self.end <= block <= self.front


@dataclass(frozen=True)
class Patch:
    """New values for a tensor, or for the part of it that ``where`` indexes."""

    values: Array
    where: Where = None


@dataclass(frozen=True)
class Change:
    """A compressed change of a tensor, or of the part of it that ``where`` indexes (core/compression.py)."""

    data: NDArray[np.uint8]
    """The change, in the form that the run's ``[upload]`` table says."""
    shape: tuple[int, ...]
    """Of the values that change."""
    where: Where = None
