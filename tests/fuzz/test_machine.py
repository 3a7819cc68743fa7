"""Honest and hostile steps in any order against real servers: the honest clients' run ends.

Three honest clients work when the machine lets them. Between that, agents and servers are restarted, and
hostile agents open sessions and upload. In the end the model must have the bits of a simulation in which the
same honest clients counted in each round, and no others.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fedel.wire.channel import connect
from tests.fuzz import frames
from tests.fuzz.rpc import RPCS, Rpc, call
from tests.fuzz.samples import RUN
from tests.fuzz.target import memory_disk
from tests.fuzz.worlds import MEMBERS, ROLES, Loyal, World, job, simulated
from tests.services.coordinator.support import Federation, trainers
from tests.strategies.fakes import same_bits

PATIENCE_SECONDS = 60.0
JOB = job(evaluate_every=0, deadline_factor=0.001, deadline_floor_seconds=1.0, max_repeats=1000)
"""A hostile agent may join, and hang up without a goodbye: its rounds wait for it until their deadline."""
UNHURRIED = job(evaluate_every=0)
"""The same for a simulation, in which devices need virtual seconds and nobody is to be late."""
CASE = st.integers(0, 10**6)
MEMBER = st.sampled_from(range(len(MEMBERS)))


class Member(Loyal):
    run = RUN


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-machine-", dir=memory_disk()))
        self.loop = asyncio.new_event_loop()
        self.made = Federation(self.folder, heartbeat_seconds=600.0)
        self.wait(self.made.__aenter__())
        self.wait(self.made.create(JOB, RUN))
        for name in MEMBERS:
            agent = Member(self.made, name, trainers()[name])
            agent.hold.clear()
            self.made.agents.append(agent)
            self.wait(self._started(agent))

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_SECONDS))

    async def _started(self, agent: Member) -> None:
        agent.start()

    async def _again(self, agents: list[Any]) -> None:
        for agent in agents:
            await agent.drop()
            agent.start()

    async def _attack(self, rpc: Rpc, number: int, rounds: int = 1) -> None:
        async with connect(self.made.aggregators[0]) as bulk:
            channels = {f"AggregatorService/{role}": bulk for role in ROLES}
            channels |= {f"CoordinatorService/{role}": self.made.channel for role in ROLES}
            # A world that holds enough sessions already: every one of these ends.
            world = World(channels, held=[None] * 1_000)
            for case in range(number, number + rounds):
                await call(world, rpc.method, frames.split(rpc.case(0, case)))

    @rule(member=MEMBER)
    def works(self, member: int) -> None:
        self.made.agents[member].hold.set()

    @rule(member=MEMBER)
    def rests(self, member: int) -> None:
        self.made.agents[member].hold.clear()

    @rule()
    def time_passes(self) -> None:
        self.wait(asyncio.sleep(0.05))

    @rule(member=MEMBER)
    def agent_restarts(self, member: int) -> None:
        self.wait(self._again([self.made.agents[member]]))

    @rule()
    def coordinator_restarts(self) -> None:
        self.wait(self.made.restart_coordinator())

    @rule()
    def aggregator_restarts(self) -> None:
        self.wait(self.made.stop_aggregator())
        self.wait(self.made.start_aggregator())
        self.wait(self._again(list(self.made.agents)))

    @rule(number=CASE)
    def hostile_sessions(self, number: int) -> None:
        self.wait(self._attack(RPCS["rpc_Session"], number, 5))

    @rule(number=CASE)
    def hostile_downloads(self, number: int) -> None:
        self.wait(self._attack(RPCS["rpc_GetModel"], number, 5))

    @rule(number=CASE)
    def hostile_uploads(self, number: int) -> None:
        self.wait(self._attack(RPCS["rpc_PutUpdate"], number, 5))

    def teardown(self) -> None:
        if not hasattr(self, "made"):
            return
        try:
            for agent in self.made.agents:
                agent.hold.set()
            self.wait(self._again(list(self.made.agents)))
            records = self.wait(self.made.finished(RUN))
            counted = [sorted(entry.client for entry in record.clients) for record in records]
            assert all(clients and set(clients) <= set(MEMBERS) for clients in counted), counted
            assert same_bits(simulated(UNHURRIED, counted), self.wait(self.made.model(RUN))), (
                "the model has other bits"
            )
        finally:
            self.wait(self.made.__aexit__())
            self.loop.close()
            shutil.rmtree(self.folder, ignore_errors=True)


def run_machine(examples: int, steps: int, derandomize: bool) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            # A history that does not end costs PATIENCE_SECONDS: to look for the shortest one would take hours.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_member_that_hangs_up_without_a_goodbye() -> None:
    """Case 34339 joins. Its first round waits for it until the deadline, and goes on."""
    machine = Machine()
    machine.start()
    machine.hostile_sessions(34335)
    assert "mallory-34339" in machine.made.coordinator.runs[RUN].state.members
    machine.teardown()


def test_a_few_histories() -> None:
    run_machine(4, 12, derandomize=True)


@pytest.mark.slow
def test_many_histories() -> None:
    run_machine(60, 30, derandomize=False)
