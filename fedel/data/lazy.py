"""Samples that are not in memory: files that numpy maps, and data sets that read one sample at a time.

>>> import numpy as np
>>> letters = Lazy.of([(np.array([n, n]), 0) for n in range(5)], "letters")
>>> letters.shape, letters[np.array([3, 1])].tolist(), letters.some(np.array([4, 2]))[::2].tolist()
((5, 2), [[3, 3], [1, 1]], [[4, 4]])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from fedel.errors import DataError
from fedel.types import Array

_CHANNELS = (1, 3, 4)
"""Grey, colour, colour with transparency."""


class Source(Protocol):
    """A map-style data set of torch, or anything else with a length whose items are a sample and its label."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Lazy:
    """In place of an array of all samples: reads those that are asked for."""

    source: Source
    name: str
    rows: Array
    """The rows of ``source`` that it stands for."""
    sample_shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of(source: Source, name: str) -> Lazy:
        if len(source) == 0:
            raise DataError(f"{name}: contains no samples")
        first = sample_of(source, 0, name)
        return Lazy(source, name, np.arange(len(source)), first.shape, first.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.sample_shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: Array | slice) -> Array:
        return np.stack([self._one(int(row)) for row in self.rows[which]])

    def some(self, rows: Array) -> Lazy:
        """The same for these rows only; reads nothing."""
        return replace(self, rows=self.rows[rows])

    def _one(self, row: int) -> Array:
        sample = sample_of(self.source, row, self.name)
        if sample.shape != self.sample_shape or sample.dtype != self.dtype:
            raise DataError(
                f"{self.name}: sample {row} is {sample.dtype} of shape {sample.shape}, but sample 0 is"
                f" {self.dtype} of shape {self.sample_shape}; make every sample the same shape"
            )
        return sample


def sample_of(source: Source, row: int, name: str) -> Array:
    """A sample without its label; images of bytes with their channels first."""
    item = source[row]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"{name}: item {row} is a {type(item).__name__}; expected a sample and its label")
    sample = np.asarray(item[0])
    if sample.dtype == object:
        raise DataError(
            f"{name}: sample {row} is a {type(item[0]).__name__}, not an array, a tensor or an image"
        )
    return cast(Array, channels_first(sample[None])[0])


def channels_first(x: Array) -> Array:
    """Bytes (N, H, W, C) or (N, H, W), which can only be images, as (N, C, H, W); everything else as it is.

    >>> import numpy as np
    >>> [channels_first(np.zeros(shape, np.uint8)).shape for shape in ((2, 8, 9, 3), (2, 8, 9), (2, 3, 8, 9))]
    [(2, 3, 8, 9), (2, 1, 8, 9), (2, 3, 8, 9)]
    """
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        return x
    if x.ndim == 3:
        return x[:, None]
    return np.moveaxis(x, -1, 1) if has_channels_last(x.shape) else x


def has_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether this looks like (N, H, W, C)."""
    return len(shape) == 4 and shape[3] in _CHANNELS and shape[1] not in _CHANNELS


def on_disk(x: Array | Lazy) -> bool:
    """Whether the samples may be more than fit into memory."""
    if isinstance(x, Lazy):
        return True
    base: Any = x
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


def in_memory(x: Array | Lazy, count: int) -> Array:
    """All samples if they are in memory, else ``count`` of them, spread evenly over all."""
    if isinstance(x, Lazy) or on_disk(x):
        return x[np.unique(np.linspace(0, len(x) - 1, min(count, len(x))).astype(int))]
    return x
