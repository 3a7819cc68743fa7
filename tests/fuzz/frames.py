"""Several messages or pieces as one input: each after its length, four bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random

from tests.fuzz.target import Mutator


def join(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def split(data: bytes) -> list[bytes]:
    """The parts; a length that is too large ends with the input."""
    parts, at = [], 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, at)
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return parts


def frames_case(pick: Callable[[int, bytes], Mutator], first: float = 0.5) -> Mutator:
    """Change one part (``pick`` gives its mutator by its place and content), or drop, repeat or move parts.

    The first part is changed with the probability ``first``, else any.
    """

    def mutated(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
        parts = split(valid)
        if not parts:
            return valid
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(parts)) if rng.random() >= first else 0
            match rng.randrange(12):
                case 0 if len(parts) > 1:
                    del parts[at]
                case 1:
                    parts.insert(at, parts[at])
                case 2:
                    rng.shuffle(parts)
                case _:
                    parts[at] = pick(at, parts[at])(rng, parts[at], others)
        return join(parts)

    return mutated
