"""Gaussian noise from a secret: without it nobody can tell the noise, with it the noise is the same again."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
from numpy.typing import NDArray

from fedel.core.exact_sum import CHUNK

_BYTES = 16
"""Of the stream, for two numbers."""
_FRACTION = 2.0**-53


def gaussian(secret: bytes, size: int, *parts: str | int) -> NDArray[np.float64]:
    """``size`` independent standard normal numbers for one purpose, such as a round and a tensor.

    The bits are SHAKE-256 of an HMAC of the purpose. Box and Muller's method makes pairs of numbers of them.

    >>> first, again, other = (gaussian(b"secret", 3, "noise", part, "w") for part in (1, 1, 2))
    >>> bool((first == again).all()), bool((first == other).any())
    (True, False)
    """
    if not secret:
        raise ValueError("noise without a secret could be subtracted by anybody")
    key = hmac.new(secret, "\x1f".join(map(str, parts)).encode(), hashlib.sha256).digest()
    numbers = np.empty(size + size % 2)
    for start in range(0, numbers.size, CHUNK):
        chunk = numbers[start : start + CHUNK]
        stream = hashlib.shake_256(key + start.to_bytes(8, "little")).digest(chunk.size // 2 * _BYTES)
        whole = np.frombuffer(stream, "<u8") >> np.uint64(11)
        half = chunk.size // 2
        # Above 0, so that the logarithm is finite.
        radius = np.sqrt(-2.0 * np.log((whole[:half] + 1.0) * _FRACTION))
        angle = whole[half:] * (2 * np.pi * _FRACTION)
        chunk[:half], chunk[half:] = radius * np.cos(angle), radius * np.sin(angle)
    return numbers[:size]
