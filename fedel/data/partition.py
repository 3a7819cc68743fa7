"""Splits a training set among clients (paper, section 5.1): Dirichlet over labels, by natural user, or iid.

Everything is drawn from one seeded generator in a fixed order, so every machine makes the same split. A saved
split has a digest, because another numpy version may draw other numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedel.data.dataset import Dataset
from fedel.errors import DataError
from fedel.files import write_atomic
from fedel.job import SPLITS
from fedel.seeds import generator
from fedel.serialisation import parse_json
from fedel.types import Array

Partition = list[Array]
"""Sorted sample indices of each client; no sample belongs to two clients."""
METHODS = SPLITS


@dataclass(frozen=True)
class PartitionConfig:
    """How the training data is split among the clients."""

    method: str = field(default="dirichlet", metadata={"words": METHODS})
    """``dirichlet``, ``dirichlet-equal`` (clients of equal size), ``user`` or ``iid``."""
    num_clients: int = 10
    """Parts of the training set, one for each client."""
    alpha: float = 0.1
    """Concentration of the Dirichlet distribution; a small value gives uneven parts."""
    balance: bool = True
    """A client that already holds 1/N of the samples is skipped for the remaining classes."""
    min_size: int = 10
    """Draw again until the smallest client has at least this many samples."""
    held_out: float = 0.0
    """Share of each client's samples that it does not train on: models are tested on them, if the job has
    ``rounds.evaluate_clients_every``."""

    def __post_init__(self) -> None:
        check_share(self.held_out)


def check_share(held_out: float) -> None:
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out = {held_out:g}: a share, at least 0 and below 1")


def hold_out(indices: Array, share: float, seed: int) -> tuple[Array, Array]:
    """A client's samples for training, and those that it tests models on; drawn from the seed of the split.

    >>> train, held = hold_out(np.arange(100, 110), 0.25, seed=1)
    >>> len(train), len(held), sorted([*train, *held]) == list(range(100, 110))
    (8, 2, True)
    >>> [len(part) for part in hold_out(np.arange(3), 0.01, seed=1)], len(hold_out(np.arange(3), 0, 1)[1])
    ([2, 1], 0)
    """
    number = min(len(indices) - 1, max(1, round(share * len(indices)))) if share else 0
    drawn = generator(seed, "held out").permutation(len(indices))
    return np.sort(indices[drawn[number:]]), np.sort(indices[drawn[:number]])


def split(data: Dataset, config: PartitionConfig, seed: int) -> Partition:
    """The training set split as configured."""
    labels, clients = data.train.y, config.num_clients
    if config.method not in METHODS:
        raise DataError(f"partition method {config.method!r} is unknown; choose one of {', '.join(METHODS)}")
    if config.method == "user":
        if data.train.users is None:
            raise DataError(
                f"{data.name} does not say whose samples they are; use the method `dirichlet` or `iid`"
            )
        return by_user(data.train.users, clients, seed)
    if config.method == "iid":
        return iid(len(labels), clients, seed)
    if labels.ndim != 1:
        raise DataError(f"{data.name} has no labels to split by; use the method `user` or `iid`")
    if config.method == "dirichlet-equal":
        return dirichlet_equal(labels, clients, config.alpha, seed)
    return dirichlet(labels, clients, config.alpha, seed, min_size=config.min_size, balance=config.balance)


def dirichlet(
    labels: Array,
    num_clients: int,
    alpha: float,
    seed: int,
    *,
    min_size: int = 10,
    balance: bool = True,
    max_tries: int = 1000,
) -> Partition:
    """Each class is split in shares drawn from Dir(alpha); repeated until no client is too small."""
    _check(len(labels), num_clients, alpha, min_size)
    rng = generator(seed, "partition", "dirichlet")
    best = 0
    for _ in range(max_tries):
        parts = _deal(labels, num_clients, alpha, balance, rng)
        smallest = min(map(len, parts))
        if smallest >= min_size:
            return parts
        best = max(best, smallest)
    raise DataError(
        f"partition: in {max_tries} draws with alpha {alpha:g} some of the {num_clients} clients always had "
        f"fewer than {min_size} samples (at best {best}); lower min_size, raise alpha, set balance = true or "
        "use the method `dirichlet-equal`"
    )


def _deal(labels: Array, num_clients: int, alpha: float, balance: bool, rng: np.random.Generator) -> Partition:
    held: list[list[Array]] = [[] for _ in range(num_clients)]
    sizes = np.zeros(num_clients, np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(num_clients, alpha))
        if balance:
            shares = np.where(sizes < len(labels) / num_clients, shares, 0.0)
        if shares.sum() <= 0.0:
            shares = (sizes == sizes.min()).astype(float)
        cuts = (np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(np.int64)
        for client, piece in enumerate(np.split(members, cuts)):
            held[client].append(piece)
            sizes[client] += len(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in held]


def dirichlet_equal(labels: Array, num_clients: int, alpha: float, seed: int) -> Partition:
    """Each client draws class probabilities from Dir(alpha); all get equally many samples, give or take 1.

    A class that is used up is left out of the later draws, so the last clients follow their probabilities
    less closely than the first.
    """
    _check(len(labels), num_clients, alpha, 1)
    rng = generator(seed, "partition", "dirichlet-equal")
    pools = [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    left = np.array([len(pool) for pool in pools])
    parts = []
    for size in _even_sizes(len(labels), num_clients):
        wanted = _draw_counts(left, size, rng.dirichlet(np.full(len(pools), alpha)), rng)
        taken = [pool[n - w : n] for pool, n, w in zip(pools, left, wanted, strict=True)]
        left = left - wanted
        parts.append(np.sort(np.concatenate(taken)))
    return parts


def _draw_counts(left: Array, size: int, shares: Array, rng: np.random.Generator) -> Array:
    """Samples per class: multinomial; what one class lacks is drawn from the other classes."""
    wanted = np.zeros_like(left)
    while (missing := size - int(wanted.sum())) > 0:
        open_shares = np.where(wanted < left, shares, 0.0)
        if open_shares.sum() <= 0.0:
            open_shares = (left - wanted).astype(float)
        wanted = np.minimum(left, wanted + rng.multinomial(missing, open_shares / open_shares.sum()))
    return wanted


def iid(num_samples: int, num_clients: int, seed: int) -> Partition:
    _check(num_samples, num_clients, 1.0, 1)
    order = generator(seed, "partition", "iid").permutation(num_samples)
    return [np.sort(part) for part in np.array_split(order, num_clients)]


def by_user(users: Array, num_clients: int, seed: int) -> Partition:
    """Whole natural users are given to clients in random order, as evenly as possible."""
    names = np.unique(users)
    if not 0 < num_clients <= len(names):
        raise DataError(
            f"partition: {num_clients} clients but {len(names)} users; use 1 to {len(names)} clients"
        )
    order = generator(seed, "partition", "user").permutation(names)
    return [np.flatnonzero(np.isin(users, group)) for group in np.array_split(order, num_clients)]


def _even_sizes(total: int, num_clients: int) -> list[int]:
    return [total // num_clients + (n < total % num_clients) for n in range(num_clients)]


def _check(num_samples: int, num_clients: int, alpha: float, min_size: int) -> None:
    if num_clients < 1:
        raise DataError(f"partition: num_clients is {num_clients}; it must be at least 1")
    if not alpha > 0.0:
        raise DataError(f"partition: alpha is {alpha:g}; it must be positive (0.1 is uneven, 100 nearly iid)")
    if num_clients * max(1, min_size) > num_samples:
        raise DataError(
            f"partition: {num_clients} clients with at least {max(1, min_size)} samples need more than the "
            f"{num_samples} available samples; use fewer clients or a lower min_size"
        )


def digest(parts: Sequence[Array]) -> str:
    """Two splits with the same digest are the same."""
    content = hashlib.sha256()
    for part in parts:
        content.update(np.array([len(part)], "<i8").tobytes())
        content.update(part.astype("<i8").tobytes())
    return content.hexdigest()[:16]


def save(path: Path, parts: Sequence[Array], data: str = "") -> None:
    """Write one JSON file with the digest and the indices of every client."""
    record = {"data": data, "digest": digest(parts), "clients": [part.tolist() for part in parts]}
    write_atomic(path, json.dumps(record, separators=(",", ":")) + "\n")


def load(path: Path) -> Partition:
    """Read a saved split; any damage is a DataError."""
    try:
        record = parse_json(path.read_text(encoding="utf-8"))
        parts = [np.array(part, np.int64) for part in record["clients"]]
        expected = record["digest"]
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as problem:
        raise DataError(f"{path}: not a saved split ({problem!r}); make it again") from problem
    if digest(parts) != expected:
        raise DataError(
            f"{path}: the indices do not match their digest {expected}; the file was changed, make it again"
        )
    return parts
