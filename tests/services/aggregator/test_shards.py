"""Two aggregators, each with its own tensors, make the model that one would have made."""

import pytest

from fedel.types import Update
from fedel.wire.streams import fetch_model, model_header, push_model
from tests.services.aggregator.support import (
    SPEC,
    aggregator,
    asynchronous,
    bits,
    close,
    first_model,
    fold_directly,
    make_update,
    open_round,
    refusal,
    seal,
    send,
)

SHARDS = [("one.weight", "one.mean", "three.weight"), ("two.weight", "two.exit")]


def share(update, names):
    return Update({n: p for n, p in update.patches.items() if n in names}, update.report)


@pytest.mark.parametrize("strategy", [{"name": "fedel"}, {"name": "pyramidfl"}, {"name": "fednova"}])
@asynchronous
async def test_two_shards_equal_one(tmp_path, strategy):
    model = first_model()
    # Client b trains nothing that the second shard keeps.
    updates = [make_update("a"), make_update("b", names=SHARDS[0]), make_update("c", names=SHARDS[1])]
    together, num_clients = {}, {}
    for number, names in enumerate(SHARDS):
        async with aggregator(tmp_path / str(number)) as (stub, _):
            await push_model(stub, model_header("run", strategy, SPEC), {n: model[n] for n in names})
            await open_round(stub, 0)
            for update in updates:
                await send(stub, share(update, names))
            answer = await close(stub, 0, clients=["a", "b", "c"])
            num_clients.update(zip(answer.tensors, answer.num_clients, strict=True))
            together.update((await fetch_model(stub, "run")).tensors)
    expected = fold_directly(updates, model, strategy)
    assert bits(expected.model) == bits({name: together[name] for name in expected.model})
    assert expected.num_clients == num_clients


@asynchronous
async def test_update_on_one_shard_only(tmp_path):
    model, together = first_model(), {}
    updates = [make_update("a"), make_update("b")]
    arrived = [updates, updates[:1]]
    async with aggregator(tmp_path / "0") as (stub_0, _), aggregator(tmp_path / "1") as (stub_1, _):
        sealed = []
        for stub, names, there in zip((stub_0, stub_1), SHARDS, arrived, strict=True):
            header = model_header("run", {"name": "fedavg"}, SPEC)
            await push_model(stub, header, {n: model[n] for n in names})
            await open_round(stub, 0)
            for update in there:
                await send(stub, share(update, names))
            reports = await seal(stub, 0)
            sealed.append({report.client for report in reports})
        for stub in (stub_0, stub_1):
            await close(stub, 0, clients=sorted(sealed[0] & sealed[1]))
            together.update((await fetch_model(stub, "run")).tensors)
    expected = fold_directly(updates[:1], model, {"name": "fedavg"}).model
    assert bits(expected) == bits({name: together[name] for name in expected})


@asynchronous
async def test_tensor_of_another_shard(tmp_path):
    model = first_model()
    async with aggregator(tmp_path) as (stub, _):
        header = model_header("run", {"name": "fedavg"}, SPEC)
        await push_model(stub, header, {n: model[n] for n in SHARDS[0]})
        await open_round(stub, 0)
        assert ("INVALID_ARGUMENT", "unknown_tensor") == await refusal(send(stub, make_update("a")))


@asynchronous
async def test_download_from_the_shard_that_has_it(tmp_path):
    model = first_model()
    async with aggregator(tmp_path) as (stub, _):
        header = model_header("run", {"name": "fedavg"}, SPEC)
        await push_model(stub, header, {n: model[n] for n in SHARDS[1]})
        mine, other = min(SHARDS[1]), min(SHARDS[0])
        fetched = await fetch_model(stub, "run", spec=SPEC, held={mine: -1})
        assert bits({mine: model[mine]}) == bits(fetched.tensors)
        asked = fetch_model(stub, "run", spec=SPEC, held={mine: -1, other: -1})
        assert ("INVALID_ARGUMENT", "unknown_tensor") == await refusal(asked)
