"""A plan is made on real agents and servers, leaves nothing behind, and says what the run after it does."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from fedel.cli.plan import lines
from fedel.desk.submit import list_runs, plan_run
from tests.federation.support import agents, create_run, job_of, servers, watching
from tests.federation.trainers import spec_of

NUM_CLIENTS = 3


async def scenario(folder: Path) -> None:
    job = job_of({"name": "fedel", "window_within": True}, NUM_CLIENTS, num_rounds=2)
    async with servers(folder) as made, agents(folder, made.address, range(NUM_CLIENTS), NUM_CLIENTS) as here:
        while len([agent for agent in here if agent._in_session]) < NUM_CLIENTS:
            await asyncio.sleep(0.01)
        plan = json.loads(await plan_run(made.address, job, spec_of(), 30.0))
        assert [] == plan["left_out"]
        assert [] == await list_runs(made.address)
        await create_run(made.address, "night", job)
        async with watching(made.address, "night") as watch:
            await watch.finished()
        planned = {client["client"]: client for client in plan["forecast"]["clients"]}
        assert NUM_CLIENTS == len(planned)
        for number, record in enumerate(watch.records):
            for entry in record.clients:
                window = planned[entry.client]["windows"][number]
                assert (window["end"], window["front"]) == entry.window
        first = watch.records[0]
        assert plan["forecast"]["budget_seconds"] == pytest.approx(first.budget_seconds)
        for entry in first.clients:
            client = planned[entry.client]
            assert (client["bytes_up"], client["num_steps"]) == (entry.bytes_up, entry.num_steps)
            assert client["bytes_down"] == entry.bytes_down
    assert not [path.name for path in folder.glob("client-*/plan-*")], "agents remove what a plan left"
    said = lines(plan)
    assert said[0].startswith("T_th ")
    assert len(said) == 2 + NUM_CLIENTS


def test_the_run_does_what_the_plan_said(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(scenario(tmp_path), 120))


def test_a_plan_says_what_does_not_fit() -> None:
    client = {
        "client": "a",
        "windows": [{"end": 1, "front": 2}, None],
        "num_steps": 3,
        "train_seconds": 1.5,
        "download_seconds": None,
        "upload_seconds": 0.25,
        "bytes_down": 1000,
        "bytes_up": 2_000_000,
        "memory_bytes": 3 * 10**9,
        "memory_limit_bytes": 2 * 10**9,
        "over_budget": True,
        "num_rounds": 2,
    }
    idle = {**client, "client": "idle", "windows": []}
    plan = {
        "forecast": {
            "budget_seconds": 0.02,
            "scope": "round",
            "deadline_seconds": 60.0,
            "clients": [client, idle],
        },
        "left_out": [{"client": "b", "why": "is not among the job's clients"}],
    }
    head, _, first, second, out = lines(plan, "gpu=orin")
    assert "T_th 20 ms per step (round); a round may close after 60 s" == head
    for said in (
        "1-2 whole",
        "1.50 s",
        "1.0 kB",
        "2.0 MB, 0.25 s",
        "over T_th",
        "memory limit of 2.0 GB",
        "2 rounds",
    ):
        assert said in first
    assert second.endswith("no task in the first rounds")
    assert "without b: it is not among the job's clients (gpu=orin)" == out
