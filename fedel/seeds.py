"""Independent random streams from one run seed: the same on every machine, for any number of workers."""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. ``derive(run_seed, "train", round_num, client)``.

    >>> derive(0, "train", 3, "jetson-1") == derive(0, "train", 3, "jetson-1")
    True
    >>> derive(0, "train", 3, "jetson-1") == derive(0, "train", 4, "jetson-1")
    False
    """
    text = "\x1f".join([str(seed), *map(str, parts)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(seed: int, *parts: str | int) -> np.random.Generator:
    return np.random.default_rng(derive(seed, *parts))
