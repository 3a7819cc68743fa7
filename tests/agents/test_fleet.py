"""What an agent does for the list of agents: its labels, its protocol, tracebacks, and profiles on request."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path

import pytest
from fedel_edge import agent as agent_module
from fedel_edge.__main__ import main

from fedel.errors import ConfigError
from fedel.v1 import coordinator_pb2
from fedel.wire.protocol import PROTOCOL
from tests.agents.stand_ins import PATIENCE_SECONDS, RUN, Federation, run_scenario, run_table, running


def test_hello_has_labels_and_protocol(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(labels={"gpu": "orin"})):
            hello = await fed.coordinator.until("hello")
            assert (PROTOCOL, {"gpu": "orin"}) == (hello.protocol, dict(hello.labels))

    run_scenario(tmp_path, scenario)


def test_a_wrong_label_ends_the_agent_with_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "agent.toml").write_text('labels = {name = "x"}\n')
    assert ConfigError.exit_code == main(["--config", str(tmp_path / "agent.toml")])
    assert "label 'name': this key is taken" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_said_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert ConfigError.exit_code == main(["--set", "device=cuda"])
    assert "device = 'cuda', but torch" in capsys.readouterr().err


@pytest.mark.parametrize(("protocol", "older"), [(0, "coordinator"), (99, "agent")])
def test_a_coordinator_of_another_protocol_is_said_once(
    tmp_path: Path, protocol: int, older: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedel.wire.retry.backoff_seconds", lambda _attempt, _longest: 0.01)
    caplog.set_level(logging.INFO)

    async def scenario(fed: Federation) -> None:
        fed.coordinator.protocol = protocol
        async with running(fed.agent()):
            await fed.coordinator.until("hello", 4)
            lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            assert 1 == len(lines)
            assert f"speaks protocol {protocol}, this agent (FedEL" in lines[0]
            assert f"upgrade the {older} to the version of the" in lines[0]
            assert "in session" not in caplog.text
            # As soon as it was upgraded, all is well.
            fed.coordinator.protocol = PROTOCOL
            await fed.coordinator.until("heartbeat")

    run_scenario(tmp_path, scenario)


def test_a_failed_task_has_its_traceback(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("failing"))
            fed.order(0)
            failed = await fed.coordinator.until("failed")
            assert "in train\n" in failed.trace
            assert failed.trace.rstrip().endswith("DataError: the disk with the samples is gone; put it back")

    run_scenario(tmp_path, scenario)


def test_a_profile_is_measured_again_once_the_agent_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "IDLE_SECONDS", 0.05)

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            first = await fed.joined(run_table("measuring"))
            for _ in range(3):  # asked three times, it measures once
                fed.coordinator.push(profile=coordinator_pb2.ProfileAgain())
            second = await fed.coordinator.until("join", 2)
            before, after = (join.profile.tensors[0].grad_seconds for join in (first, second))
            assert after == pytest.approx(2 * before)
            fed.order(0)
            await fed.done(0)
            assert 2 == len(fed.coordinator.all("join"))

    run_scenario(tmp_path, scenario)


def test_a_profile_of_a_run_that_ended_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "IDLE_SECONDS", 0.01)

    async def scenario(fed: Federation) -> None:
        agent = fed.agent()
        async with running(agent):
            await fed.joined(run_table("held"))
            fed.order(0)
            await fed.coordinator.until("progress")
            fed.coordinator.push(profile=coordinator_pb2.ProfileAgain())
            fed.coordinator.push(ended=coordinator_pb2.RunEnded(run=RUN))
            fed.coordinator.push(profile=coordinator_pb2.ProfileAgain())
            measuring = [task for task in asyncio.all_tasks() if "_profile_again" in str(task.get_coro())]
            await asyncio.wait_for(asyncio.gather(*measuring), PATIENCE_SECONDS)
            assert 1 == len(fed.coordinator.all("join"))

    run_scenario(tmp_path, scenario)


def test_an_agent_that_is_refused_says_it_once_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedel.wire.retry.backoff_seconds", lambda _attempt, _longest: 0.01)

    async def scenario(fed: Federation) -> None:
        fed.coordinator.refuses_with = "the agent speaks protocol 0: upgrade it"
        async with running(fed.agent()):
            while fed.coordinator.sessions < 10:
                await asyncio.sleep(0.01)
                gc.collect()

    run_scenario(tmp_path, scenario)
    gc.collect()
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 == len(said), said
    assert "upgrade it" in said[0]
