"""Small made-up data for the scale ``ci``: no download, learnt in seconds."""

from __future__ import annotations

import numpy as np

from fedel.data.dataset import Dataset, Split
from fedel.data.text import MASK, SPECIAL
from fedel.data.transforms import MaskedTokens
from fedel.types import Array

NUM_CLASSES = 4


def images(channels: int = 3, num_train: int = 320, num_test: int = 80) -> tuple[Array, Array, Array, Array]:
    """Images of 32 x 32 pixels: each class has a pattern with noise."""
    rng = np.random.default_rng(5)
    patterns = rng.normal(size=(NUM_CLASSES, channels, 32, 32))
    y = rng.integers(0, NUM_CLASSES, num_train + num_test)
    x = (patterns[y] + rng.normal(size=(len(y), channels, 32, 32))).astype(np.float32)
    return x[:num_train], y[:num_train], x[num_train:], y[num_train:]


def text(num_users: int = 16, blocks_each: int = 6, block_size: int = 8) -> Dataset:
    """Users who count upwards with their own words; each starts at another number."""
    rng = np.random.default_rng(5)
    words = tuple(f"w{n}" for n in range(12))
    first = len(SPECIAL)
    starts = rng.integers(0, len(words), (num_users * blocks_each, 1))
    x = first + (starts + np.arange(block_size)) % len(words)
    users = np.repeat(np.arange(num_users), blocks_each)
    test = np.arange(len(x)) % 6 == 0
    masking = MaskedTokens(first + len(words), MASK, tuple(range(first)))
    parts = [Split(x[rows], x[rows], users[rows]) for rows in (~test, test)]
    names = tuple(f"user-{n}" for n in range(num_users))
    return Dataset("tiny-text", "text", parts[0], parts[1], (*SPECIAL, *words), masking, names)
