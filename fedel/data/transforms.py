"""Converts stored arrays to model input: always normalise, augment in training (paper, section 5.1).

Each works on a whole batch and draws from the generator in a fixed order, so a batch is the same on every
machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedel.data.dataset import IGNORE
from fedel.data.lazy import Lazy, on_disk
from fedel.errors import DataError
from fedel.seeds import derive, generator
from fedel.types import Array

_MOST_MEASURED = 4_000_000


def normalise(x: Array, mean: tuple[float, ...], std: tuple[float, ...]) -> Array:
    """``(x - mean) / std`` per channel in float32; uint8 is scaled to 0..1 first."""
    unit = 255.0 if x.dtype == np.uint8 else 1.0
    shape = (1, -1) + (1,) * (x.ndim - 2)
    centre = np.asarray(mean or (0.0,), np.float32).reshape(shape)
    width = np.asarray(std or (1.0,), np.float32).reshape(shape)
    out = x.astype(np.float32, order="C")  # also where channels were moved: torch's view() needs that order
    out *= 1.0 / (unit * width)
    out -= centre / width
    return out


def measure(x: Array | Lazy, num_samples: int = 2000) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, from at most ``num_samples`` samples spread over ``x``.

    Of samples that are not in memory, no more than fit into ``_MOST_MEASURED`` values.
    """
    if on_disk(x):
        num_samples = min(num_samples, max(16, _MOST_MEASURED // math.prod(x.shape[1:])))
    some = x[:: max(1, len(x) // num_samples)].astype(np.float64)
    if x.dtype == np.uint8:
        some /= 255.0
    axes = (0, *range(2, x.ndim))
    mean, std = some.mean(axes), np.maximum(some.std(axes), 1e-3)
    return tuple(round(float(m), 4) for m in mean), tuple(round(float(s), 4) for s in std)


@dataclass(frozen=True)
class Images:
    """Images (N, C, H, W); in training a random crop of the padded image, flipped with probability 1/2."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    padding: int = 0
    """Black pixels added on each side before the crop; 0 switches the crop off."""
    flip: bool = False

    def __call__(self, x: Array, y: Array, rng: np.random.Generator | None) -> tuple[Array, Array]:
        if rng is not None and self.padding:
            x = self._crop(x, rng)
        if rng is not None and self.flip:
            mirrored = rng.random(len(x)) < 0.5
            x = np.where(mirrored[:, None, None, None], x[..., ::-1], x)
        return normalise(x, self.mean, self.std), y.astype(np.int64)

    def _crop(self, x: Array, rng: np.random.Generator) -> Array:
        p, (height, width) = self.padding, x.shape[2:]
        top, left = rng.integers(0, 2 * p + 1, (2, len(x)))
        padded = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
        views = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
        cropped: Array = views[np.arange(len(x)), :, top, left]
        return cropped


@dataclass(frozen=True)
class LogMel:
    """Log-mel images (N, 1, mel, frames), 0 is the quietest; in training they are shifted in time."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.25,)
    shift: int = 0
    """Maximum shift of a training clip in frames, earlier or later; filled with silence."""

    def __call__(self, x: Array, y: Array, rng: np.random.Generator | None) -> tuple[Array, Array]:
        if rng is not None and self.shift:
            x = shift_frames(x, rng.integers(-self.shift, self.shift + 1, len(x)))
        return normalise(x, self.mean, self.std), y.astype(np.int64)


def shift_frames(x: Array, steps: Array) -> Array:
    """Shift each sample of (N, ..., frames) later by its own number of frames; filled with zeros."""
    frames = x.shape[-1]
    source = np.arange(frames) - steps[:, None]
    inside = (source >= 0) & (source < frames)
    spread = (len(x),) + (1,) * (x.ndim - 2) + (frames,)
    moved = np.take_along_axis(x, np.broadcast_to(source.clip(0, frames - 1).reshape(spread), x.shape), -1)
    return np.where(inside.reshape(spread), moved, np.zeros((), x.dtype))


@dataclass(frozen=True)
class MaskedTokens:
    """Masked-LM targets (N, length): ``rate`` of the tokens, of which 80 % masked, 10 % random, 10 % kept."""

    vocab_size: int
    mask_id: int
    special_ids: tuple[int, ...]
    """Number of tokens with the lowest ids that are never changed or drawn, such as [CLS] and [SEP]."""
    rate: float = 0.15
    test_seed: int = 0

    def __call__(self, x: Array, _: Array, rng: np.random.Generator | None) -> tuple[Array, Array]:
        x = x.astype(np.int64)
        if rng is not None:
            chosen, kind, other = self._draw(x.shape, rng)
        else:
            rows = [self._draw(row.shape, self._test_rng(row)) for row in x]
            chosen, kind, other = (np.stack(part) for part in zip(*rows, strict=True))
        target = (chosen < self.rate) & ~np.isin(x, self.special_ids)
        tokens = np.where(target & (kind < 0.8), self.mask_id, x)
        tokens = np.where(target & (kind >= 0.9), other, tokens)
        return tokens, np.where(target, x, IGNORE)

    def _test_rng(self, row: Array) -> np.random.Generator:
        """A block is changed in the same way in every batch and run: its tokens are the seed."""
        return generator(derive(self.test_seed, row.astype("<i8").tobytes().hex()))

    def _draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Array, Array, Array]:
        lowest = len(self.special_ids)
        return rng.random(shape), rng.random(shape), rng.integers(lowest, self.vocab_size, shape)


@dataclass(frozen=True)
class Plain:
    """Unchanged samples: floats as float32, integers as int64 tokens."""

    def __call__(self, x: Array, y: Array, _: np.random.Generator | None) -> tuple[Array, Array]:
        dtype = np.float32 if np.issubdtype(x.dtype, np.floating) else np.int64
        return x.astype(dtype), y.astype(np.int64)


def shrunk(name: str, pixels: Array, size: int) -> Array:
    """Images (N, C, H, W) of bytes at ``size`` pixels, each the mean of a square; 0 leaves them as they are."""
    full = pixels.shape[-1]
    size = size or full
    if size < 0 or full % size:
        raise DataError(f"{name}: size = {size}: images of {full} pixels can be halved, to {full // 2}, ...")
    side = full // size
    squares = pixels.reshape(*pixels.shape[:2], size, side, size, side)
    return squares.mean((3, 5), dtype=np.float32).round().astype(np.uint8) if side > 1 else pixels
