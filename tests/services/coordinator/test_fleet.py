"""The list of agents, and what an operator does with one; real servers, scripted agents."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from fedel_coordinator import fleet as registry
from grpc import aio

from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.codec import spec_to_pb
from tests.services.coordinator.scripted_agent import SPEC, STEP_SECONDS, ScriptedAgent
from tests.services.coordinator.support import RUN, Federation, asynchronous, run_config, until


async def listed(federation: Federation, selector: str = "") -> dict[str, pb.AgentStatus]:
    answer = await federation.stub.ListAgents(pb.ListAgentsRequest(selector=selector))
    return {agent.name: agent for agent in answer.agents}


async def shown(federation: Federation, name: str) -> pb.AgentStatus:
    """With the trace of its last error."""
    return (await federation.stub.ListAgents(pb.ListAgentsRequest(name=name))).agents[0]


async def change(federation: Federation, name: str, action: str, **request: Any) -> pb.AgentStatus:
    number = pb.AgentAction.Value(f"AGENT_ACTION_{action.upper()}")
    call = federation.stub.ControlAgent(pb.ControlAgentRequest(name=name, action=number, **request))
    return (await call).status


async def until_state(federation: Federation, name: str, state: str) -> pb.AgentStatus:
    async def look() -> pb.AgentStatus:
        while (agent := (await listed(federation)).get(name)) is None or agent.state != state:
            await asyncio.sleep(0.01)
        return agent

    return await asyncio.wait_for(look(), STEP_SECONDS)


async def heard(agent: ScriptedAgent, kind: str) -> Any:
    return getattr(await agent.heard.until(lambda message: message.HasField(kind)), kind)


def has_heard(agent: ScriptedAgent, kind: str) -> bool:
    return any(message.HasField(kind) for message in agent.heard.all)


async def connected(federation: Federation, *names: str, **kwargs: Any) -> list[ScriptedAgent]:
    agents = [federation.agent(name, **kwargs) for name in names]
    for agent in agents:
        await heard(agent, "welcome")
    return agents


@asynchronous
async def test_agents_are_listed_without_a_run(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        assert {} == await listed(federation)
        (agent,) = await connected(federation, "client-1", labels={"gpu": "orin"})
        found = (await listed(federation))["client-1"]
        assert ("ready", True, "fake", {"gpu": "orin"}) == (
            found.state,
            found.connected,
            found.device_type,
            dict(found.labels),
        )
        assert not found.HasField("last_error")
        await agent.leave()
        found = await until_state(federation, "client-1", "away")
        assert not found.connected
        assert 0 <= federation.coordinator.clock() - found.last_seen < STEP_SECONDS


@asynchronous
async def test_the_list_outlives_the_coordinator(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        (agent,) = await connected(federation, "client-1", labels={"gpu": "orin"})
        await change(federation, "client-1", "label", labels={"site": "roof", "gpu": "nano"})
        await change(federation, "client-1", "cordon")
        await agent.drop()
        federation.agents.clear()
        await federation.restart_coordinator()
        found = (await listed(federation))["client-1"]
        assert ("drained", True, False) == (found.state, found.cordoned, found.connected)
        assert {"site": "roof", "gpu": "nano"} == dict(found.labels), "the operator's win"
        await change(federation, "client-1", "label", dropped=["gpu"])
        assert {"site": "roof", "gpu": "orin"} == dict((await listed(federation))["client-1"].labels)


@asynchronous
async def test_pages_join_to_the_whole_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedel_coordinator.agent_calls.PAGE_BYTES", 100)
    async with Federation(tmp_path) as federation:
        names = ["client-0", "client-1", "client-2", "client-3"]
        await connected(federation, *names)
        found: list[str] = []
        while True:
            after = found[-1] if found else ""
            page = await federation.stub.ListAgents(pb.ListAgentsRequest(after=after))
            assert len(page.agents) < len(names)
            found += [agent.name for agent in page.agents]
            if not page.more:
                break
        assert names == found
        assert ["client-2"] == list(await listed(federation, "name=client-2"))


@pytest.mark.parametrize(
    ("action", "request_", "code", "said"),
    [
        ("label", {"labels": {"a b": "x"}}, "INVALID_ARGUMENT", "a key has 1 to 63"),
        ("label", {"dropped": ["gpu"]}, "INVALID_ARGUMENT", "no label 'gpu' of an operator"),
        ("forget", {}, "FAILED_PRECONDITION", "is connected"),
        ("unspecified", {}, "INVALID_ARGUMENT", "choose label, cordon"),
    ],
)
@asynchronous
async def test_a_wish_that_cannot_be_granted_is_refused(
    tmp_path: Path, action: str, request_: dict[str, Any], code: str, said: str
) -> None:
    async with Federation(tmp_path) as federation:
        await connected(federation, "client-1")
        with pytest.raises(aio.AioRpcError, match=said) as refused:
            await change(federation, "client-1", action, **request_)
        assert code == refused.value.code().name
        with pytest.raises(aio.AioRpcError, match="has had a session here") as refused:
            await change(federation, "nobody", action, **request_)


@asynchronous
async def test_an_agent_that_is_gone_can_be_forgotten(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        (agent,) = await connected(federation, "client-1")
        await agent.leave()
        await until_state(federation, "client-1", "away")
        await change(federation, "client-1", "forget")
        assert {} == await listed(federation)
        federation.agents.clear()
        await federation.restart_coordinator()
        assert {} == await listed(federation)


@asynchronous
async def test_a_selector_chooses_who_gets_an_offer(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        (one,) = await connected(federation, "client-0", labels={"gpu": "orin"})
        (two,) = await connected(federation, "client-1")
        config = run_config(min_clients=2, num_rounds=1)
        table = config.table() | {"clients": "gpu=orin"}
        await federation.create(type(config).parse(table))
        await heard(one, "run")
        said = "waits for 1 more client; of 2 connected agents, 1 may take part, clients = 'gpu=orin'"
        await federation.status(lambda s: s.message == said)
        assert not has_heard(two, "run")
        await two.send(join=pb.Join(run=RUN, model_digest=two.digest, num_samples=1))
        refused = await heard(two, "refused")
        assert "not among the job's clients ('gpu=orin')" in refused.reason
        # The operator's label makes it one of them, without a visit to the device.
        await change(federation, "client-1", "label", labels={"gpu": "orin"})
        await federation.finished()
        assert {"client-0", "client-1"} == set(federation.coordinator.runs[RUN].state.members)


@asynchronous
async def test_a_cordoned_agent_finishes_its_task_and_gets_no_other(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        agents = federation.start_agents()
        agents[0].hold.clear()
        await federation.create(run_config(num_rounds=3))
        await heard(agents[0], "task")
        status = await change(federation, "client-0", "cordon")
        assert ("draining", True, [RUN]) == (status.state, status.cordoned, list(status.runs))
        agents[0].hold.set()
        records = await federation.finished()
        counted = [[entry.client for entry in record.clients] for record in records]
        assert ["client-0", "client-1", "client-2"] == counted[0], "the task that it had counts"
        assert [["client-1", "client-2"]] * 2 == counted[1:]
        assert "drained" == (await listed(federation))["client-0"].state


@asynchronous
async def test_a_cordoned_agent_that_comes_back_still_finishes_its_task(tmp_path: Path) -> None:
    """Its session breaks while it trains, and the coordinator is restarted."""
    async with Federation(tmp_path) as federation:
        agents = federation.start_agents()
        agents[0].hold.clear()
        await federation.create(run_config(num_rounds=2))
        await heard(agents[0], "task")
        await change(federation, "client-0", "cordon")
        agents[0].hold.set()
        agents[0].script[0] = "upload"
        await federation.restart_coordinator()
        agents[0].script.clear()
        records = await federation.finished()
        assert ["client-0" in [e.client for e in record.clients] for record in records] == [True, False]


@asynchronous
async def test_an_uncordoned_agent_is_back_in_the_next_round(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        agents = federation.start_agents()
        await until_state(federation, "client-2", "ready")
        await change(federation, "client-2", "cordon")
        agents[0].hold.clear()
        await federation.create(run_config(num_rounds=2, min_clients=2))
        await heard(agents[0], "task")
        assert not has_heard(agents[2], "run"), "no offer"
        await change(federation, "client-2", "uncordon")
        await heard(agents[2], "run")
        run = federation.coordinator.runs[RUN]
        await until(lambda: "client-2" in run.state.members, run)
        agents[0].hold.set()
        records = await federation.finished()
        assert ["client-2" in [e.client for e in record.clients] for record in records] == [False, True]


@asynchronous
async def test_the_last_error_is_kept_with_its_trace(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        (agent,) = await connected(federation, "client-0")
        await federation.create(run_config(min_clients=1))
        await heard(agent, "run")
        trace = "Traceback\n  File x\nRuntimeError: boom\x1b[2J"
        await agent.send(failed=pb.TaskFailed(run=RUN, round_num=-1, message="boom", trace="x" * 9000 + trace))
        said = "waits for 1 more client; client-0 could not join: boom"
        await federation.status(lambda s: s.message == said)
        error = (await shown(federation, "client-0")).last_error
        assert (RUN, -1, "boom") == (error.run, error.round_num, error.message)
        assert error.trace.endswith("RuntimeError: boom [2J")
        assert len(error.trace) <= 8010
        assert "" == (await listed(federation))["client-0"].last_error.trace, "a list is short"


@pytest.mark.parametrize("protocol", [0, 99])
@asynchronous
async def test_an_agent_of_another_protocol_is_refused_in_words(
    tmp_path: Path, protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with Federation(tmp_path) as federation:
        hello = pb.Hello(client="old", device=pb.DeviceFacts(agent_version="0.0.9"), protocol=protocol)
        for _ in range(2):
            call = federation.stub.Session(iter([pb.SessionRequest(hello=hello)]))
            with pytest.raises(aio.AioRpcError) as refused:
                await call.read()
        assert grpc.StatusCode.FAILED_PRECONDITION is refused.value.code()
        said = refused.value.details() or ""
        assert f"the agent (FedEL 0.0.9) speaks protocol {protocol}, this coordinator (FedEL " in said
        older = "agent" if protocol == 0 else "coordinator"
        assert f"upgrade the {older} to the version of the" in said
        found = (await listed(federation))["old"]
        assert ("refused", protocol, said) == (found.state, found.protocol, found.last_error.message)
        assert 1 == caplog.text.count("agent 'old' is refused")
        assert 0 == federation.coordinator.sessions.num_sessions


@asynchronous
async def test_one_warning_when_an_agent_falls_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with Federation(tmp_path, heartbeat_seconds=0.05, silent_heartbeats=2) as federation:
        (killed,) = await connected(federation, "client-0")
        (leaving,) = await connected(federation, "client-1")
        await leaving.leave()
        await killed.drop()
        await _logged(caplog, "agent 'client-0' is silent")
        killed.start()
        await _logged(caplog, "agent 'client-0' is heard again")
        await _logged(caplog, "agent 'client-0' is silent", 2)
        assert 2 == caplog.text.count("is silent: it was last heard"), "one line each time"
        assert "client-1' is silent" not in caplog.text, "it said goodbye"


async def _logged(caplog: pytest.LogCaptureFixture, text: str, times: int = 1) -> None:
    async def look() -> None:
        while caplog.text.count(text) < times:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), STEP_SECONDS)


@asynchronous
async def test_heartbeats_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "FLUSH_SECONDS", 0.01)
    async with Federation(tmp_path) as federation:
        (agent,) = await connected(federation, "client-0")
        written: list[int] = []
        put = federation.coordinator.store.put_agents

        def counted(rows: Any) -> None:
            written.append(len(rows))
            put(rows)

        monkeypatch.setattr(federation.coordinator.store, "put_agents", counted)
        await change(federation, "client-0", "cordon")
        before = len(written)
        for _ in range(20):
            await agent.send(heartbeat=pb.Heartbeat())
            await asyncio.sleep(0.01)
        assert before == len(written) <= 2


@asynchronous
async def test_the_registry_is_bounded(tmp_path: Path) -> None:
    """Agents that were away longest make way; those of whom an operator said something stay."""
    async with Federation(tmp_path, max_agents=2) as federation:
        for name in ("client-0", "client-1", "client-2"):
            (agent,) = await connected(federation, name)
            if name == "client-0":
                await change(federation, name, "label", labels={"a": "b"})
            await agent.leave()
            await until_state(federation, name, "away")
        assert ["client-0", "client-2"] == list(await listed(federation))
        await change(federation, "client-2", "cordon")
        refused = federation.agent("client-3")
        await asyncio.wait_for(refused._task, STEP_SECONDS)
        assert "remembers no more (max_agents)" in refused.why
        await federation.coordinator.fleet.flush()
        assert {"client-0", "client-2"} == {row.name for row in federation.coordinator.store.agents()}


@asynchronous
async def test_a_profile_is_asked_for(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        (agent,) = await connected(federation, "client-0")
        await change(federation, "client-0", "profile")
        await heard(agent, "profile")
        await agent.leave()
        await until_state(federation, "client-0", "away")
        with pytest.raises(aio.AioRpcError, match="is away"):
            await change(federation, "client-0", "profile")


async def planned(federation: Federation, wait_seconds: float = 20.0, clients: str = "") -> dict[str, Any]:
    table = run_config().table() | {"clients": clients}
    request = pb.PlanRunRequest(config_json=json.dumps(table), spec=spec_to_pb(SPEC), wait_seconds=wait_seconds)
    return json.loads((await federation.stub.PlanRun(request)).plan_json)


@asynchronous
async def test_a_plan_has_the_first_windows_of_every_agent_and_leaves_no_run(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        agents = await connected(federation, "client-0", "client-1", labels={"gpu": "orin"})
        await connected(federation, "client-2")
        await change(federation, "client-1", "cordon")
        plan = await planned(federation, clients="gpu")
        (client,) = plan["forecast"]["clients"]
        assert ("client-0", 3) == (client["client"], len(client["windows"]))
        assert plan["forecast"]["budget_seconds"] > 0
        assert client["bytes_up"] > 0
        assert {"client-1": "is cordoned", "client-2": "is not among the job's clients"} == {
            out["client"]: out["why"] for out in plan["left_out"]
        }
        await heard(agents[0], "ended")
        assert not (await federation.stub.ListRuns(pb.ListRunsRequest())).runs
        assert {} == federation.coordinator.dry_runs


@asynchronous
async def test_a_plan_says_who_cannot_take_part(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        (good, bad, mute) = await connected(federation, "client-0", "client-1", "client-2")
        bad.digest = "another"
        mute.mute_offers = True
        plan = await planned(federation, wait_seconds=1.0)
        assert ["client-0"] == [client["client"] for client in plan["forecast"]["clients"]]
        said = {out["client"]: out["why"] for out in plan["left_out"]}
        assert "could not join: the agent built a model with the digest 'another'" in said["client-1"]
        assert said["client-2"].startswith("did not answer in 1 s")
        await good.leave()


@asynchronous
async def test_a_plan_without_agents_says_so(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        assert {"forecast": None, "left_out": []} == await planned(federation)
        with pytest.raises(aio.AioRpcError, match="wait_seconds is above 0"):
            await planned(federation, wait_seconds=0.0)
