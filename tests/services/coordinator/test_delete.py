"""Runs that are deleted with everything that the servers keep of them, and results that are fetched."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from fedel_coordinator import housekeeping
from grpc import aio

from fedel.records import RoundRecord, RunResult
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.watch import whole
from tests.services.coordinator.support import Federation, asynchronous, run_config

CONFIG = run_config(num_rounds=2, min_clients=1, evaluate_every=0)


async def delete(federation: Federation, *runs: str, **how: object) -> list[pb.DeletedRun]:
    return list((await federation.stub.DeleteRuns(pb.DeleteRunsRequest(runs=runs, **how))).runs)


async def names(federation: Federation) -> list[str]:
    return [status.run for status in (await federation.stub.ListRuns(pb.ListRunsRequest())).runs]


def kept(folder: Path) -> list[str]:
    """Folders of runs at the aggregators and the coordinator."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/runs/*")) + sorted(
        str(path.relative_to(folder)) for path in folder.glob("runs/*")
    )


@asynchronous
async def test_a_deleted_run_leaves_nothing_behind_and_its_name_is_free(tmp_path: Path) -> None:
    async with Federation(tmp_path, 2, runs_dir=tmp_path / "runs") as federation:
        await federation.create(CONFIG, "night")
        federation.agent("client-0")
        await federation.finished("night")
        assert ["aggregator-0/runs/night", "aggregator-1/runs/night", "runs/night"] == kept(tmp_path)
        (told,) = await delete(federation, "night", dry_run=True)
        assert (True, 2, True, True) == (
            told.found,
            told.num_rounds,
            told.aggregator_bytes > 100,
            told.folder_bytes > 100,
        )
        assert ["night"] == await names(federation)
        assert [told] == await delete(federation, "night")
        assert ([], []) == (await names(federation), kept(tmp_path))
        (again,) = await delete(federation, "night")
        assert (False, 0, 0) == (again.found, again.aggregator_bytes, again.folder_bytes)
        await federation.create(CONFIG, "night")
        assert 2 == len(await federation.finished("night"))


@asynchronous
async def test_an_active_run_is_not_deleted_nor_anything_beside_it(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(CONFIG, "done")
        await federation.control(pb.RUN_ACTION_STOP_NOW, "done")
        await federation.create(CONFIG, "busy")
        with pytest.raises(aio.AioRpcError) as caught:
            await delete(federation, "done", "busy")
        assert grpc.StatusCode.FAILED_PRECONDITION == caught.value.code()
        assert "not over: busy. Nothing was deleted; `fedel runs stop NAME`" in caught.value.details()
        assert ["busy", "done"] == await names(federation)
        assert ["done"] == [each.run for each in await delete(federation, older_than_seconds=0.0)]
        assert [] == await delete(federation, older_than_seconds=3600.0)
        assert ["busy"] == await names(federation)


@asynchronous
async def test_a_run_stays_listed_until_every_aggregator_has_deleted_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fedel_coordinator.shards.END_TRIES", 0)
    async with Federation(tmp_path) as federation:
        await federation.create(CONFIG, "night")
        await federation.control(pb.RUN_ACTION_STOP_NOW, "night")
        await federation.stop_aggregator()
        with pytest.raises(aio.AioRpcError) as caught:
            await delete(federation, "night")
        assert "run 'night' is still listed; start it, then delete the run again" in caught.value.details()
        assert ["night"] == await names(federation)
        monkeypatch.undo()
        await federation.start_aggregator()
        assert ["night"] == [each.run for each in await delete(federation, "night")]


@asynchronous
async def test_a_run_of_an_earlier_start_is_deleted_too(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(CONFIG, "night")
        await federation.control(pb.RUN_ACTION_STOP_NOW, "night")
        await federation.restart_coordinator()
        (told,) = await delete(federation, "night")
        assert told.found
        assert [] == await names(federation)


@asynchronous
async def test_the_coordinator_deletes_what_is_too_old_or_too_much(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fedel.roles.retention.GRACE_SECONDS", 0.0)
    async with Federation(tmp_path) as federation:
        for name in ("one", "two", "three"):
            await federation.create(CONFIG, name)
            await federation.control(pb.RUN_ACTION_STOP_NOW, name)
        await federation.create(CONFIG, "busy")
        monkeypatch.setattr(housekeeping, "LOOK_SECONDS", 0.01)
        federation.settings |= {"keep_runs": 1}
        await federation.restart_coordinator()
        while len(await names(federation)) > 2:
            pass
        assert ["busy", "three"] == await names(federation)


@asynchronous
async def test_the_result_of_a_run_comes_with_its_end(tmp_path: Path) -> None:
    async with Federation(tmp_path, runs_dir=tmp_path / "runs") as federation:
        await federation.create(CONFIG, "night")
        with pytest.raises(aio.AioRpcError) as caught:
            await federation.stub.GetResult(pb.GetResultRequest(run="night"))
        assert "run 'night' is not over" in caught.value.details()
        federation.agent("client-0")
        await federation.finished("night")
        told = (await federation.stub.GetResult(pb.GetResultRequest(run="night"))).result_json
        written = (tmp_path / "runs/night/result.json").read_text()
        assert (2, "finished") == (RunResult.from_json(told).rounds, RunResult.from_json(told).phase)
        assert json.loads(written) == json.loads(told)
        await federation.restart_coordinator()
        assert told == (await federation.stub.GetResult(pb.GetResultRequest(run="night"))).result_json


@asynchronous
async def test_a_follower_chooses_the_first_round_that_it_gets(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=5, min_clients=1, evaluate_every=0), "night")
        federation.agent("client-0")
        await federation.finished("night")
        for first, expected in ((0, [0, 1, 2, 3, 4]), (3, [3, 4]), (-2, [3, 4]), (-9, [0, 1, 2, 3, 4])):
            request = pb.WatchRunRequest(run="night", first_round=first)
            lines = [
                line async for status in whole(federation.stub.WatchRun(request)) for line in status.rounds_json
            ]
            assert expected == [RoundRecord.from_json(line).round for line in lines]
