"""Which aggregator keeps which tensor."""

from __future__ import annotations

from fedel.types import ModelSpec


def assign(spec: ModelSpec, num_shards: int) -> list[list[str]]:
    """Tensor names of each shard, in forward order; every caller gets the same answer.

    The largest tensor goes first, each to the shard that has least so far.

    >>> from fedel.types import TensorSpec
    >>> sizes = {"a": 4, "b": 9, "c": 5, "d": 1}
    >>> tensors = tuple(TensorSpec(name, 1, (size,)) for name, size in sizes.items())
    >>> assign(ModelSpec("toy", ("only",), tensors), 2)
    [['b', 'd'], ['a', 'c']]
    """
    if num_shards < 1:
        raise ValueError(f"num_shards = {num_shards}: a model is kept by one aggregator or more")
    load = [0] * num_shards
    shard_of: dict[str, int] = {}
    for tensor in sorted(spec.tensors, key=lambda t: -t.size):
        shard = load.index(min(load))
        shard_of[tensor.name] = shard
        load[shard] += tensor.size
    return [[t.name for t in spec.tensors if shard_of[t.name] == shard] for shard in range(num_shards)]
