from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.roles.sharding import assign
from fedel.types import ModelSpec, TensorSpec


def spec_of(sizes: list[int]) -> ModelSpec:
    return ModelSpec("toy", ("only",), tuple(TensorSpec(f"t{i}", 1, (size,)) for i, size in enumerate(sizes)))


SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


@settings(deadline=None)
@given(SIZES, st.integers(1, 6))
def test_every_tensor_is_kept_by_one_shard_in_forward_order(sizes: list[int], num_shards: int) -> None:
    spec = spec_of(sizes)
    shards = assign(spec, num_shards)
    position = {t.name: i for i, t in enumerate(spec.tensors)}
    assert num_shards == len(shards)
    assert sorted(position) == sorted(name for shard in shards for name in shard)
    assert all(shard == sorted(shard, key=position.__getitem__) for shard in shards)


@settings(deadline=None)
@given(SIZES, st.integers(1, 6))
def test_no_shard_has_more_than_the_largest_tensor_above_another(sizes: list[int], num_shards: int) -> None:
    spec = spec_of(sizes)
    loads = [sum(spec.by_name[name].size for name in shard) for shard in assign(spec, num_shards)]
    assert max(loads) - min(loads) <= max(sizes)


def test_one_shard_keeps_everything() -> None:
    assert [["t0", "t1", "t2"]] == assign(spec_of([3, 1, 2]), 1)


def test_equal_sizes_are_dealt_in_forward_order() -> None:
    assert [["t0", "t2"], ["t1", "t3"]] == assign(spec_of([5, 5, 5, 5]), 2)


def test_no_shard_is_an_error() -> None:
    with pytest.raises(ValueError, match="one aggregator or more"):
        assign(spec_of([1]), 0)
