"""A data set as the rest of FedEL sees it: compact arrays that become batches for a model on demand.

>>> import numpy as np
>>> from fedel.data.transforms import Images
>>> pixels, labels = np.zeros((4, 3, 8, 8), np.uint8), np.array([0, 1, 0, 1])
>>> toy = Dataset("toy", "image", Split(pixels, labels), Split(pixels, labels), ("cat", "dog"), Images())
>>> x, y = toy.train_batch(np.array([2, 3]), np.random.default_rng(0))
>>> x.dtype.name, x.shape, y.tolist()
('float32', (2, 3, 8, 8), [0, 1])
>>> toy
Dataset('toy': 4 training + 4 test samples of uint8 (3, 8, 8), 2 classes)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import numpy as np

from fedel.data.lazy import Lazy, in_memory
from fedel.errors import DataError
from fedel.types import Array

Kind = Literal["image", "speech", "text", "other"]
IGNORE = -100
"""Target of a position that does not count in the loss; ``ignore_index`` in torch."""


class Transform(Protocol):
    """Converts stored samples to model inputs; a frozen dataclass, so that it can be sent and compared."""

    def __call__(self, x: Array, y: Array, rng: np.random.Generator | None, /) -> tuple[Array, Array]:
        """Inputs (float32, or int64 tokens) and int64 targets.

        With ``rng``: augmented for training; the result depends only on the state of ``rng``. Without: for
        testing; a sample gives the same result every time and in any batch. Draws from ``rng`` for every sample
        or for none. Never changes its arguments.
        """
        ...


@dataclass(frozen=True, eq=False)
class Split:
    """Stored samples: images and log-mel as uint8, waves as int16, text as blocks of tokens."""

    x: Array | Lazy
    """In memory, in a file that numpy maps (``np.load(..., mmap_mode="r")``), or read one by one."""
    y: Array
    """int64 labels; for text the blocks themselves, because targets are made per batch."""
    users: Array | None = None
    """Natural owner of each sample (speaker, author) as an index into ``Dataset.user_names``."""

    def __len__(self) -> int:
        return len(self.x)

    def some(self, count: int) -> Split:
        """``count`` samples, spread evenly over all of them."""
        rows = np.linspace(0, len(self) - 1, count).astype(int)
        x = self.x.some(rows) if isinstance(self.x, Lazy) else self.x[rows]
        return Split(x, self.y[rows], None if self.users is None else self.users[rows])

    def __repr__(self) -> str:
        return f"Split({len(self):,} samples of {self.x.dtype} {self.x.shape[1:]})"


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set, which is split among clients, and a global test set."""

    name: str
    kind: Kind
    train: Split
    test: Split
    classes: tuple[str, ...]
    """Names of the classes; for text, the vocabulary."""
    transform: Transform
    user_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_split(f"{self.name}: training set", self.train, self.num_classes)
        check_split(f"{self.name}: test set", self.test, self.num_classes)
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise DataError(
                f"{self.name}: training samples have the shape {self.train.x.shape[1:]}, "
                f"test samples {self.test.x.shape[1:]}; give both the same shape"
            )

    def __repr__(self) -> str:
        return (
            f"Dataset({self.name!r}: {len(self.train):,} training + {len(self.test):,} test samples of"
            f" {self.train.x.dtype} {self.train.x.shape[1:]}, {self.num_classes:,} classes)"
        )

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one model input, e.g. ``(3, 32, 32)``."""
        return self.train_batch(np.arange(1))[0].shape[1:]

    @cached_property
    def augmented(self) -> bool:
        """Whether a training sample gives another input each time: the transform draws from ``rng``."""
        rng = np.random.default_rng(0)
        before = rng.bit_generator.state
        self.train_batch(np.arange(1), rng)
        return rng.bit_generator.state != before

    def train_batch(self, indices: Array, rng: np.random.Generator | None = None) -> tuple[Array, Array]:
        """Training samples ``indices`` as model input; without ``rng`` they are not augmented."""
        return self.transform(self.train.x[indices], self.train.y[indices], rng)

    def test_batches(self, batch_size: int = 256, limit: int | None = None) -> Iterator[tuple[Array, Array]]:
        """The test set in order, or ``limit`` samples spread evenly over it."""
        total = len(self.test)
        order = np.arange(total) if limit is None else np.linspace(0, total - 1, min(limit, total)).astype(int)
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            yield self.transform(self.test.x[rows], self.test.y[rows], None)


def check_split(where: str, split: Split, num_classes: int) -> None:
    """Raise DataError if the arrays are not valid samples and labels of ``num_classes`` classes.

    Of samples that are not in memory, 256 are checked for NaN and infinity.
    """
    x, y = split.x, split.y
    if x.dtype == object or y.dtype == object:
        raise DataError(f"{where}: dtype object (samples of unequal shape?); make every sample the same shape")
    if len(x) == 0:
        raise DataError(f"{where}: contains no samples")
    if len(x) != len(y):
        raise DataError(f"{where}: {len(x)} samples but {len(y)} labels; there must be one label per sample")
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{where}: labels have dtype {y.dtype}; convert them to integers 0..{num_classes - 1}")
    if y.min() < 0:
        raise DataError(f"{where}: label {y.min()} is negative; labels must be 0..{num_classes - 1}")
    if y.max() >= num_classes:
        raise DataError(f"{where}: label {y.max()} but {num_classes} classes; labels are 0..{num_classes - 1}")
    if np.issubdtype(x.dtype, np.floating) and not np.isfinite(in_memory(x, 256)).all():
        raise DataError(f"{where}: samples contain NaN or infinity; remove these before training")
    if split.users is not None and len(split.users) != len(x):
        raise DataError(
            f"{where}: {len(x)} samples but {len(split.users)} user ids; there must be one per sample"
        )
