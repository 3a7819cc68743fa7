"""Bringing, fetching and keeping versions of a model."""

import numpy as np
import pytest
import safetensors.numpy
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import SERVICE, serve
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedel.errors import ServiceError
from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.channel import connect
from fedel.wire.streams import fetch_model, model_header, push_model
from tests.services.aggregator.support import (
    FEDAVG,
    SPEC,
    aggregator,
    asynchronous,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    make_update,
    metric,
    refusal,
    send,
)


@asynchronous
async def test_first_model_comes_back_exactly(tmp_path):
    model = first_model()
    async with aggregator(tmp_path) as (stub, servicer):
        assert 0 == await create(stub, model)
        fetched = await fetch_model(stub, "run")
        assert (0, bits(model)) == (fetched.version, bits(fetched.tensors))
        assert sum(v.nbytes for v in model.values()) == fetched.num_bytes
        assert fetched.num_bytes == metric(servicer, "fedel_download_bytes_total")


@asynchronous
async def test_create_again(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a"))
        await close(stub, 0)
        assert 0 == await create(stub)
        assert 1 == (await fetch_model(stub, "run")).version
        assert ("ALREADY_EXISTS", "conflict") == await refusal(create(stub, first_model(seed=1)))


@asynchronous
async def test_wrong_first_model_leaves_no_run(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        broken = first_model()
        broken["three.weight"][3] = np.nan
        assert ("INVALID_ARGUMENT", "not_finite") == await refusal(create(stub, broken))
        assert ("INVALID_ARGUMENT", "header") == await refusal(create(stub, strategy={"name": "fedex"}))
        assert ("INVALID_ARGUMENT", "header") == await refusal(create(stub, late="perhaps"))
        no_json = model_header("run", FEDAVG, SPEC)
        no_json.strategy_json = "{"
        assert ("INVALID_ARGUMENT", "header") == await refusal(push_model(stub, no_json, first_model()))
        assert ("INVALID_ARGUMENT", "header") == await refusal(create(stub, run=""))
        alien = push_model(stub, model_header("run", FEDAVG, SPEC), {"alien": np.zeros(3, np.float32)})
        assert ("INVALID_ARGUMENT", "unknown_tensor") == await refusal(alien)
        assert ("NOT_FOUND", "unknown_run") == await refusal(fetch_model(stub, "run"))
        await create(stub)
        assert 0 == (await fetch_model(stub, "run")).version


@asynchronous
async def test_download_of_changed_tensors(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a", 0, {"one.weight", "two.exit"}))
        await close(stub, 0)
        await send(stub, make_update("a", 1, {"three.weight"}))
        await close(stub, 1)
        whole = (await fetch_model(stub, "run")).tensors
        held = first_model()
        from_0, from_1 = [await fetch_model(stub, "run", have_version=v) for v in (0, 1)]
        assert {"one.weight", "two.exit", "three.weight"} == set(from_0.tensors)
        assert {"three.weight"} == set(from_1.tensors)
        assert 4 * 11 == from_1.num_bytes
        assert bits(whole) == bits({**held, **from_0.tensors})
        assert {} == (await fetch_model(stub, "run", have_version=2)).tensors
        # A version that this aggregator never made is of another history.
        assert set(whole) == set((await fetch_model(stub, "run", have_version=9)).tensors)


@asynchronous
async def test_download_of_tensors_that_are_needed(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a", 0, {"one.weight", "two.exit"}))
        await close(stub, 0)
        await send(stub, make_update("a", 1, {"three.weight"}))
        await close(stub, 1)
        whole = (await fetch_model(stub, "run")).tensors

        async def fetched(version=2, **held):
            answer = await fetch_model(stub, "run", version, spec=SPEC, held=held)
            assert bits({name: whole[name] for name in answer.tensors}) == bits(answer.tensors)
            assert sum(values.nbytes for values in answer.tensors.values()) == answer.num_bytes
            return set(answer.tensors)

        names = ["one.weight", "one.mean", "two.weight", "two.exit", "three.weight"]
        assert {"one.weight", "one.mean"} == await fetched(**dict.fromkeys(names[:2], -1))
        assert {"one.weight"} == await fetched(**dict.fromkeys(names[:3], 0)), "each since its own version"
        assert {"one.mean", "three.weight"} == await fetched(**dict(zip(names, (1, -1, 0, 2, 1), strict=True)))
        assert set() == await fetched(**dict.fromkeys(names, 2))
        # One that the caller holds of a version that this aggregator never made is of another history.
        assert {"two.weight"} == await fetched(**{**dict.fromkeys(names, 2), "two.weight": 3})
        assert {"one.weight"} == await fetched(1, **{"one.weight": 2, "two.exit": 1})


@asynchronous
async def test_only_tensors_of_the_model_can_be_asked_for(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for places, versions in [
            ([5], [0]),
            ([-1], [0]),
            ([0, 0], [0, 0]),
            ([1], []),
            ([], [1]),
            ([3, 2], [0, 0]),
        ]:
            request = pb.GetModelRequest(run="run", version=-1, tensors=places, have_versions=versions)
            assert ("INVALID_ARGUMENT", "unknown_tensor") == await refusal(stub.GetModel(request).read())
        assert 0 == (await fetch_model(stub, "run")).version


@asynchronous
async def test_unchanged_tensors_are_not_downloaded(tmp_path):
    model = first_model()
    for values in model.values():
        values[np.abs(values) < 2**-14] = 0.5
    same = make_update("a")
    for name, patch in same.patches.items():
        patch.values[...] = model[name]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, model, strategy={"name": "fedavg", "weighting": "uniform"})
        await send(stub, same)
        await close(stub, 0)
        assert (1, {}, 0) == tuple(await fetch_model(stub, "run", have_version=0))


@asynchronous
async def test_kept_versions(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, keep_every=4)
        for round_num in range(10):
            await send(stub, make_update("a", round_num, {"three.weight"}))
            await close(stub, round_num)
            if round_num in (1, 4):
                keep = pb.KeepVersionRequest(run="run", version=round_num + 1, label="best")
                await stub.KeepVersion(keep)
        folder = tmp_path / "runs" / "run" / "versions"
        kept = sorted(int(path.stem) for path in folder.glob("*.safetensors"))
        assert [0, 4, 5, 8, 9, 10] == kept
        assert kept == sorted(int(path.stem) for path in folder.glob("*.json"))
        assert ("NOT_FOUND", "unknown_version") == await refusal(fetch_model(stub, "run", version=3))
        keep = pb.KeepVersionRequest(run="run", version=3, label="best")
        assert ("NOT_FOUND", "unknown_version") == await refusal(stub.KeepVersion(keep))
        assert 5 == (await fetch_model(stub, "run", version=5)).version
    assert [] == [p for p in tmp_path.rglob("*") if p.name.endswith((".tmp", ".update", ".part"))]


@asynchronous
async def test_safetensors_library_reads_a_version(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a"))
        await close(stub, 0)
        fetched = await fetch_model(stub, "run", version=1)
    path = tmp_path / "runs" / "run" / "versions" / "000001.safetensors"
    assert bits(fetched.tensors) == bits(safetensors.numpy.load_file(path))


@asynchronous
async def test_strategy_state_persists(tmp_path):
    strategy = {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 4}
    model, state = first_model(), {}
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, model, strategy)
        for round_num in range(2):
            updates = [make_update(client, round_num) for client in "ab"]
            for update in updates:
                await send(stub, update)
            await close(stub, round_num)
            closed = fold_directly(updates, model, strategy, state)
            model, state = closed.model, closed.state
        assert state
        assert bits(model) == bits((await fetch_model(stub, "run")).tensors)


@asynchronous
async def test_healthy_after_loading(tmp_path):
    config = AggregatorConfig(listen="127.0.0.1:0", data_dir=tmp_path, port_file=tmp_path / "address")
    async with serve(config) as (address, _), connect(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        serving_now = health_pb2.HealthCheckResponse.SERVING
        for name in ("", SERVICE):
            assert serving_now == (await check(health_pb2.HealthCheckRequest(service=name))).status
        assert address == (tmp_path / "address").read_text()


@asynchronous
async def test_unavailable_while_loading(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        servicer._runs.loaded = False
        assert ("UNAVAILABLE", "starting") == await refusal(fetch_model(stub, "run"))


@asynchronous
async def test_data_dir_in_use(tmp_path):
    async with aggregator(tmp_path):
        with pytest.raises(ServiceError, match="another aggregator uses this data_dir"):
            async with aggregator(tmp_path):
                pass


@asynchronous
async def test_max_downloads(tmp_path):
    async with aggregator(tmp_path, max_downloads=1) as (stub, _):
        await create(stub)
        blocking = stub.GetModel(pb.GetModelRequest(run="run", version=-1, have_version=-1))
        await blocking.read()
        blocking.cancel()
        assert 0 == (await fetch_model(stub, "run")).version


@asynchronous
async def test_several_runs(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        for run in ("../a", "b"):
            await create(stub, run=run)
        await send(stub, make_update("x"), run="../a")
        await close(stub, 0, run="../a")
        assert (1, 0) == tuple([(await fetch_model(stub, run)).version for run in ("../a", "b")])
    assert ["%2E%2E%2Fa", "b"] == sorted(path.name for path in (tmp_path / "runs").iterdir())
