"""What the coordinator tells over HTTP: runs, rounds and changes; and who may do what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve

from fedel.errors import ServiceError
from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import RUN, SPEC, asynchronous, run_config
from tests.web.support import ACCURACIES, TOKEN, shown


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / RUN / "rounds.jsonl").read_text().splitlines()]


@asynchronous
async def test_a_run_is_listed_and_told_with_its_clients(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        assert [] == (await asker.get("/api/runs"))["runs"]
        federation.start_agents(3, accuracies=ACCURACIES)
        await federation.create(run_config(num_rounds=2))
        await federation.finished()
        (listed,) = (await asker.get("/api/runs"))["runs"]
        told = await asker.get(f"/api/runs/{RUN}")
    assert (RUN, "fedel", "finished", 2, 2) == tuple(
        listed[key] for key in ("run", "strategy", "phase", "rounds_closed", "num_rounds")
    )
    assert 0.2 == listed["best_accuracy"]
    assert list(SPEC.block_names) == told["blocks"]
    assert [t.name for t in SPEC.weights] == [t["name"] for t in told["tensors"]]
    assert 4 * sum(t.size for t in SPEC.tensors) == told["model_bytes"]
    last = {entry["client"]: entry for entry in lines(tmp_path)[-1]["clients"]}
    assert sorted(last) == [client["client"] for client in told["clients"]]
    for client in told["clients"]:
        for key in ("window", "bytes_up", "budget_seconds"):
            assert last[client["client"]][key] == client[key]
        assert "fake" == client["device_type"]


@asynchronous
async def test_rounds_come_in_brief_for_one_client_or_in_full(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        federation.start_agents(3)
        await federation.create(run_config(num_rounds=3))
        await federation.finished()
        rounds = f"/api/runs/{RUN}/rounds"
        brief, full = await asker.get(rounds), await asker.get(f"{rounds}?full=1")
        later = await asker.get(f"{rounds}?since=1&limit=1&client=client-2")
        assert {"rounds": [], "next": 3} == await asker.get(f"{rounds}?since=3")
    written = lines(tmp_path)
    assert written == full["rounds"]
    assert (3, 2) == (brief["next"], later["next"])
    for short, record in zip(brief["rounds"], written, strict=True):
        assert record["latency_seconds"] == short["latency_seconds"]
        assert [record["tensor_clients"][t.name] for t in SPEC.weights] == short["tensor_clients"]
        assert "clients" not in short
    (mine,) = [e for e in written[1]["clients"] if e["client"] == "client-2"]
    assert [(1, mine)] == [(r["round"], r["client"]) for r in later["rounds"]]


@asynchronous
async def test_a_follower_hears_how_things_stand_then_each_change_and_the_end(tmp_path: Path) -> None:
    heard: list[tuple[str, Any]] = []
    async with shown(tmp_path) as (federation, asker):
        agents = federation.start_agents(3)
        for agent in agents:
            agent.hold.clear()
        await federation.create(run_config(num_rounds=2))
        async with asker.events(RUN) as events:
            async for kind, data in events:
                heard.append((kind, data))
                if kind == "status" and data["open_round"]:
                    for agent in agents:
                        agent.hold.set()
    kinds = [kind for kind, _ in heard]
    assert "status" == kinds[0]
    assert "end" == kinds[-1]
    assert {"seen", "clients"} <= set(kinds)
    assert [0, 1] == [data["round"] for kind, data in heard if kind == "round"]
    windows = [row["window"] for kind, data in heard if kind == "clients" for row in data]
    assert None in windows
    assert [r for r in windows if r], "windows are told as they come to be"


@asynchronous
async def test_a_follower_that_comes_back_hears_only_the_rounds_it_missed(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        federation.start_agents(3)
        await federation.create(run_config(num_rounds=3))
        await federation.finished()
        async with asker.events(RUN, **{"Last-Event-ID": "2"}) as events:
            assert [2] == [data["round"] async for kind, data in events if kind == "round"]


@asynchronous
async def test_a_run_that_ended_before_a_restart_is_still_told(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        federation.start_agents(3, accuracies=ACCURACIES)
        await federation.create(run_config(num_rounds=2))
        await federation.finished()
        before = await asker.get(f"/api/runs/{RUN}")
        await federation.restart_coordinator()
        told = await asker.get(f"/api/runs/{RUN}")
        for key in ("run", "strategy", "phase", "rounds_closed", "best_accuracy", "tensors"):
            assert before[key] == told[key]
        assert [c["window"] for c in before["clients"]] == [c["window"] for c in told["clients"]]
        async with asker.events(RUN) as events:
            kinds = [kind async for kind, _ in events]
    assert ["status", "clients", "round", "round", "end"] == [kind for kind in kinds if kind != "log"]


@asynchronous
async def test_the_events_of_the_log_reach_followers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    texts: list[str] = []
    async with shown(tmp_path) as (federation, asker):
        federation.agent("client-0", script={0: "fail"})
        federation.agent("client-1")
        federation.agent("client-2")
        await federation.create(run_config(num_rounds=1))
        async with asker.events(RUN) as events:
            async for kind, data in events:
                texts += [event["text"] for event in data] if kind == "log" else []
    assert "client-1 joined" in texts
    assert "client-0 failed: out of memory" in texts


@asynchronous
async def test_without_a_token_nobody_controls(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        await federation.create(run_config())
        assert False is (await asker.get("/api/runs"))["can_control"]
        status, answer = await asker.ask(f"/api/runs/{RUN}/stop", "POST", Authorization="Bearer ")
        assert 403 == status
        assert "set http_token" in answer["error"]
        assert "waiting" == federation.coordinator.runs[RUN].state.phase


@asynchronous
async def test_with_the_token_runs_are_paused_resumed_and_stopped(tmp_path: Path) -> None:
    async with shown(tmp_path, http_token=TOKEN) as (federation, asker):
        await federation.create(run_config())
        assert True is (await asker.get("/api/runs"))["can_control"]
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            status, answer = await asker.ask(f"/api/runs/{RUN}/pause", "POST", **wrong)
            assert (403, True) == (status, "Bearer TOKEN" in answer["error"])
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert "paused" == (await asker.ask(f"/api/runs/{RUN}/pause", "POST", **right))[1]["phase"]
        assert "waiting" == (await asker.ask(f"/api/runs/{RUN}/resume", "POST", **right))[1]["phase"]
        assert 200 == (await asker.ask(f"/api/runs/{RUN}/stop", "POST", **right))[0]
        await federation.status(lambda status: status.phase == pb.RUN_PHASE_STOPPED)
        await federation.create(run_config(min_clients=1), "other")
        federation.agent("client-0", script={0: "silent"})
        await federation.status(lambda status: status.round_phase == "train", "other")
        assert 200 == (await asker.ask("/api/runs/other/stop_now", "POST", **right))[0]
        await federation.status(lambda status: status.phase == pb.RUN_PHASE_STOPPED, "other")
        status, answer = await asker.ask(f"/api/runs/{RUN}/resume", "POST", **right)
        assert 409 == status
        assert "create a new run" in answer["error"]


@asynchronous
async def test_what_is_not_there_is_told_with_a_way_on(tmp_path: Path) -> None:
    async with shown(tmp_path) as (federation, asker):
        await federation.create(run_config())
        assert (404, {"error": "no run 'x' here: /api/runs lists all runs"}) == await asker.ask("/api/runs/x")
        assert (
            404,
            {"error": "there is nothing at /favicon.ico: see docs/api.md for what there is"},
        ) == await asker.ask("/favicon.ico")
        status, answer = await asker.ask(f"/api/runs/{RUN}/rounds?since=soon")
        assert (400, True) == (status, "whole number" in answer["error"])
        status, answer = await asker.ask(f"/api/runs/{RUN}/stop")
        assert (405, True) == (status, "use POST" in answer["error"])
        assert 404 == (await asker.ask("/../config.py"))[0]


@asynchronous
async def test_the_page_is_served_with_a_strict_policy_and_nothing_foreign(tmp_path: Path) -> None:
    async with shown(tmp_path) as (_, asker):
        answer, page = await asker.raw("/")
        assert "text/html" == answer.content_type
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert "nosniff" == answer.headers["X-Content-Type-Options"]
        assert "http://" not in page
        assert "https://" not in page
        for name, kind in {
            "page.css": "text/css",
            "page.js": "text/javascript",
            "icon.svg": "image/svg+xml",
        }.items():
            answer, _ = await asker.raw(f"/{name}")
            assert (200, kind) == (answer.status, answer.content_type)
        assert {"status": "ok"} == await asker.get("/healthz")


@asynchronous
async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    async with shown(tmp_path) as (_, asker):
        taken = asker.address.removeprefix("http://")
        config = CoordinatorConfig(listen="127.0.0.1:0", http=taken, database_url="sqlite://")
        with pytest.raises(ServiceError, match=f"http = '{taken}': cannot listen there"):
            async with serve(config):
                pass
