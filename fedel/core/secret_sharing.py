"""Secrets in shares: a threshold of them gives the secret back, fewer say nothing about it (Shamir, 1979)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

PRIME = 2**521 - 1
SHARE_BYTES = 66
Random = Callable[[int], bytes]
"""So many bytes that nobody can tell, such as ``secrets.token_bytes``."""


def split(secret: bytes, places: Collection[int], threshold: int, random: Random) -> dict[int, bytes]:
    """A share for each place, a number above 0.

    >>> import secrets
    >>> shares = split(b"secret", [1, 2, 3, 4], 3, secrets.token_bytes)
    >>> join({place: shares[place] for place in (4, 1, 3)}, 6)
    b'secret'
    """
    if len(secret) >= SHARE_BYTES - 1:
        raise ValueError(f"a secret of {len(secret)} bytes is too long to share")
    numbers = (int.from_bytes(random(SHARE_BYTES + 16), "big") % PRIME for _ in range(threshold - 1))
    polynomial = [int.from_bytes(secret, "big"), *numbers]
    return {place: _value(polynomial, place).to_bytes(SHARE_BYTES, "big") for place in places}


def _value(polynomial: list[int], at: int) -> int:
    value = 0
    for number in reversed(polynomial):
        value = (value * at + number) % PRIME
    return value


def join(shares: Mapping[int, bytes], num_bytes: int) -> bytes:
    """The secret of so many bytes; ``shares`` are as many as the threshold, or more."""
    secret = 0
    for place, share in shares.items():
        above = below = 1
        for other in shares.keys() - {place}:
            above, below = above * other % PRIME, below * (other - place) % PRIME
        secret += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    try:
        return (secret % PRIME).to_bytes(num_bytes, "big")
    except OverflowError:
        raise ValueError("these shares do not belong together, or are too few") from None
