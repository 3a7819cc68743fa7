"""An operator's day with ten agents, each a process: labels, a selector, cordon, drain, a failing one, an old
one, and five that are stopped and started again, as an upgrade does it. No update is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fedel.chaos.processes import Process
from fedel.cli.main import main
from fedel.desk.submit import list_agents
from fedel.job import RunConfig
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.processes import REPOSITORY, RUN, gate_of
from tests.federation.support import Watch, create_run, job_of, until, watching

NUM_AGENTS, NUM_ROUNDS = 10, 6
CORDONED, DRAINED, FAILING, IN_LAB, OLD = "client-1", "client-2", "client-7", "client-8", "client-9"
UPGRADED = ["client-0", "client-3", "client-4", "client-5", "client-6"]
ALL = sorted([*UPGRADED, CORDONED, DRAINED])


@dataclass(frozen=True)
class Fleet:
    address: str
    agents: Mapping[str, Process]
    watch: Watch

    async def agent(self, name: str) -> pb.AgentStatus:
        (found,), _ = await list_agents(self.address, name=name)
        return found

    async def until_state(self, name: str, state: str) -> None:
        while (await self.agent(name)).state != state:
            await asyncio.sleep(0.05)

    async def fedel(self, *words: str) -> int:
        return await asyncio.to_thread(main, ["fleet", *words, "--coordinator", self.address])


@asynccontextmanager
async def fleet(folder: Path, job: RunConfig) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:

        def started(module: str, process_name: str, **settings: Any) -> Process:
            process = Process(module, process_name, folder, settings, user_code=REPOSITORY)
            stack.callback(process.kill)
            process.start()
            return process

        aggregator = started(
            "fedel_aggregator",
            "aggregator",
            listen="127.0.0.1:0",
            port_file=str(folder / "a.address"),
            data_dir=str(folder / "a"),
        )
        coordinator = started(
            "fedel_coordinator",
            "coordinator",
            listen="127.0.0.1:0",
            port_file=str(folder / "c.address"),
            aggregators=[await aggregator.address()],
            database_url=f"sqlite:///{folder / 'coordinator.db'}",
        )
        address = await coordinator.address()
        agents = {
            name: started(
                "tests.federation.old_agent" if name == OLD else "fedel_edge",
                name,
                coordinator=address,
                name=name,
                labels={"site": "lab" if name == IN_LAB else "roof"},
                state_dir=str(folder / name),
                data={"index": index, "of": NUM_AGENTS},
                code={"allow": ["tests"]},
            )
            for index, name in enumerate(f"client-{index}" for index in range(NUM_AGENTS))
        }
        await until(lambda: not any(agent.returncode for agent in agents.values()), "agents")
        await create_run(address, RUN, job)
        watch = await stack.enter_async_context(watching(address, RUN))
        yield Fleet(address, agents, watch)


async def scenario(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"gate": str(folder / "gate")}
    job = job_of({"name": "fedel"}, 8, NUM_ROUNDS, trainer="gated", options=options)
    job = replace(job, clients="site=roof")
    gate = gate_of(job)
    for round_num in range(NUM_ROUNDS):
        gate.fail(FAILING, round_num)
    for client in (CORDONED, DRAINED):
        gate.hold(client, 1)
    for client in UPGRADED:
        gate.hold(client, 3)
    gate.hold(UPGRADED[0], 4)
    async with fleet(folder, job) as made:
        await until(lambda: gate.times_trained(DRAINED, 1) > 0, "round 1 is under way")
        await check_list(made, capsys)
        await cordon_and_drain(made, gate, capsys)
        await upgrade(made, gate)
        await made.fedel("uncordon", CORDONED)
        gate.release(UPGRADED[0], 4)
        await made.watch.finished()
        assert [ALL, ALL] + [UPGRADED] * 3 + [sorted([*UPGRADED, CORDONED])] == made.watch.counted
        refused = [record.refused for record in made.watch.records]
        assert all(reasons.keys() == {FAILING} for reasons in refused), refused
        assert all("planted" in reasons[FAILING] for reasons in refused)


async def check_list(made: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    await made.until_state(OLD, "refused")
    old = await made.agent(OLD)
    assert "speaks protocol 0" in old.last_error.message
    assert "upgrade the agent to the version of the coordinator" in old.last_error.message
    assert "speaks protocol 0" in made.agents[OLD].log.read_text()
    await made.until_state(IN_LAB, "ready")
    assert [] == list((await made.agent(IN_LAB)).runs), "it got no offer"
    capsys.readouterr()
    assert 0 == await made.fedel("show", FAILING)
    said = capsys.readouterr().out
    assert "in train" in said
    assert said.rstrip().endswith("RuntimeError: planted")


async def cordon_and_drain(made: Fleet, gate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == await made.fedel("cordon", CORDONED)
    assert f"{CORDONED} is cordoned, and still works on a task of {RUN}" in capsys.readouterr().out
    draining = asyncio.create_task(made.fedel("drain", DRAINED))
    await made.until_state(DRAINED, "draining")
    assert not draining.done()
    for client in (CORDONED, DRAINED):
        gate.release(client, 1)
    assert 0 == await draining
    assert f"{DRAINED} is drained: it has no task, and can be stopped" in capsys.readouterr().out
    await made.until_state(CORDONED, "drained")


async def upgrade(made: Fleet, gate: Any) -> None:
    """One after the other, each in the middle of its training."""
    for client in UPGRADED:
        await until(lambda client=client: gate.times_trained(client, 3) > 0, f"{client} trains in round 3")
        agent = made.agents[client]
        assert await agent.stop(20), "it ends when it is asked to"
        agent.start()
        await until(lambda client=client: gate.times_trained(client, 3) > 1, f"{client} trains again")
    for client in UPGRADED:
        gate.release(client, 3)
    await until(lambda: gate.times_trained(UPGRADED[0], 4) > 0, "round 4 is under way")


@pytest.mark.slow
def test_an_operators_day_with_ten_agents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(asyncio.wait_for(scenario(tmp_path, capsys), 600))
