"""Splits: disjoint, complete, the same on every machine, and never an endless loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.data import partition
from fedel.data.dataset import Dataset, Split
from fedel.data.partition import PartitionConfig
from fedel.data.transforms import Plain
from fedel.errors import DataError

LABELS = np.repeat(np.arange(10), 500)


def assert_complete(parts: partition.Partition, total: int) -> None:
    np.testing.assert_array_equal(np.arange(total), np.sort(np.concatenate(parts)))
    assert all((np.diff(part) > 0).all() for part in parts)


@settings(max_examples=40, deadline=None)
@given(
    alpha=st.sampled_from([0.05, 0.1, 0.5, 10.0]),
    clients=st.integers(1, 30),
    seed=st.integers(0, 10_000),
    balance=st.booleans(),
)
def test_every_sample_goes_to_exactly_one_client(alpha: float, clients: int, seed: int, balance: bool) -> None:
    assert_complete(partition.dirichlet(LABELS, clients, alpha, seed, min_size=0, balance=balance), len(LABELS))
    assert_complete(partition.dirichlet_equal(LABELS, clients, alpha, seed), len(LABELS))
    assert_complete(partition.iid(len(LABELS), clients, seed), len(LABELS))


def test_small_alpha_gives_few_classes_and_large_alpha_all() -> None:
    def dominant(alpha: float) -> float:
        parts = partition.dirichlet(LABELS, 10, alpha, 0)
        counts = np.stack([np.bincount(LABELS[p], minlength=10) for p in parts])
        return float(np.mean((counts > 0.1 * counts.sum(1, keepdims=True)).sum(1)))

    assert 1.0 <= dominant(0.1) <= 4.0
    assert dominant(100.0) > 4.0


def test_smallest_client_has_the_minimum() -> None:
    assert min(map(len, partition.dirichlet(LABELS, 10, 0.1, 3, min_size=50))) >= 50


def test_equal_clients_have_equal_sizes_to_one() -> None:
    assert {16, 17} == {len(p) for p in partition.dirichlet_equal(LABELS[:1000], 60, 0.1, 0)}


def test_the_split_is_the_same_for_ever() -> None:
    assert "0a7946a5b470e6bd" == partition.digest(partition.dirichlet(LABELS, 10, 0.1, 0))
    assert "c036e751fac69d7c" == partition.digest(partition.dirichlet_equal(LABELS, 10, 0.1, 0))
    assert "1e0dd2ac2c2d3af3" == partition.digest(partition.iid(5000, 10, 0))


def test_what_cannot_be_is_said_instead_of_tried_for_ever() -> None:
    with pytest.raises(DataError, match=r"in 20 draws .* lower min_size"):
        partition.dirichlet(LABELS, 100, 0.01, 0, min_size=45, balance=False, max_tries=20)
    with pytest.raises(DataError, match="600 clients with at least 10 samples need more than the 5000"):
        partition.dirichlet(LABELS, 600, 0.1, 0)
    with pytest.raises(DataError, match="alpha is 0"):
        partition.dirichlet(LABELS, 10, 0.0, 0)


def test_users_are_never_split_between_clients() -> None:
    users = np.random.default_rng(0).integers(0, 23, 400)
    parts = partition.by_user(users, 5, 0)
    assert_complete(parts, 400)
    owners = [set(users[p].tolist()) for p in parts]
    assert sum(map(len, owners)) == 23
    assert {4, 5} == {len(o) for o in owners}
    with pytest.raises(DataError, match="24 clients but 23 users"):
        partition.by_user(users, 24, 0)


def test_configured_split_says_which_methods_fit() -> None:
    x = np.zeros((5000, 2), np.float32)
    data = Dataset("toy", "other", Split(x, LABELS), Split(x, LABELS), tuple("0123456789"), Plain())
    for method in ("dirichlet", "dirichlet-equal", "iid"):
        assert_complete(partition.split(data, PartitionConfig(method, 7), 1), 5000)
    with pytest.raises(DataError, match="does not say whose"):
        partition.split(data, PartitionConfig("user"), 1)
    with pytest.raises(DataError, match="'even' is unknown; choose one of dirichlet"):
        partition.split(data, PartitionConfig("even"), 1)


def test_saved_split_comes_back_and_damage_is_seen(tmp_path: Path) -> None:
    parts = partition.dirichlet(LABELS, 4, 0.5, 0)
    file = tmp_path / "split.json"
    partition.save(file, parts, "toy")
    back = partition.load(file)
    assert [p.tolist() for p in parts] == [p.tolist() for p in back]
    record = json.loads(file.read_text())
    record["clients"][0][0], record["clients"][1][0] = record["clients"][1][0], record["clients"][0][0]
    file.write_text(json.dumps(record))
    with pytest.raises(DataError, match=r"split.json: the indices do not match"):
        partition.load(file)
    file.write_text("{}")
    with pytest.raises(DataError, match=r"split.json: not a saved split"):
        partition.load(file)
