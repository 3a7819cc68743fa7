"""The coordinator as a process: how it starts, stops, and survives being killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import grpc
import pytest
from fedel_coordinator.__main__ import main, read_config
from fedel_coordinator.server import SERVICE
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from tests.services.coordinator.support import STEP_SECONDS, Federation, asynchronous, run_config
from tests.services.coordinator.test_rounds import expected_model
from tests.strategies.fakes import same_bits


class Process:
    """``python -m fedel_coordinator`` on a federation's database."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._port_file = federation.folder / "address"
        self.process: asyncio.subprocess.Process

    async def start(self) -> None:
        federation = self._federation
        self._port_file.unlink(missing_ok=True)
        settings = {
            "listen": '"127.0.0.1:0"',
            "port_file": f'"{self._port_file}"',
            "database_url": f'"{federation.settings["database_url"]}"',
            "aggregators": f'["{federation.aggregators[0]}"]',
        }
        arguments = [argument for key, value in settings.items() for argument in ("--set", f"{key}={value}")]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fedel_coordinator", *arguments, stderr=asyncio.subprocess.PIPE
        )
        assert self.process.stderr is not None
        while b"listens on" not in (line := await asyncio.wait_for(self.process.stderr.readline(), 30)):
            assert line, "the coordinator ended before it listened"
        self._log = asyncio.create_task(self.process.stderr.read())
        federation.address = self._port_file.read_text()
        self.channel = connect(federation.address)
        federation.stub = CoordinatorServiceStub(self.channel)

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = await asyncio.wait_for(self.process.wait(), STEP_SECONDS)
        await self._log
        await self.channel.close()
        return code


@asynchronous
async def test_a_killed_coordinator_goes_on_where_it_was(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.stop_coordinator()
        process = Process(federation)
        await process.start()
        await federation.create(run_config(evaluate_every=0))
        agents = federation.start_agents(3)
        agents[2].hold.clear()
        await agents[0].uploaded.wait()
        assert -signal.SIGKILL == await process.end(signal.SIGKILL)
        for agent in agents:
            await asyncio.wait_for(agent._task, STEP_SECONDS)
            assert grpc.StatusCode.UNAVAILABLE == agent.error
        await process.start()
        agents[2].hold.set()
        for agent in agents:
            agent.start()
        records = await federation.finished()
        assert [3, 3, 3] == [record.num_updates for record in records]
        assert same_bits(expected_model(), await federation.model())
        assert 0 == await process.end(signal.SIGTERM)


@asynchronous
async def test_sigterm_ends_sessions_and_followers_at_once_and_leaves_the_run(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.stop_coordinator()
        process = Process(federation)
        await process.start()
        health = health_pb2_grpc.HealthStub(process.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert health_pb2.HealthCheckResponse.SERVING == answer.status
        await federation.create(run_config(min_clients=4))
        agent = federation.agent("client-0")
        follower = asyncio.create_task(federation.finished())
        await federation.status(lambda s: len(s.clients) == 1)
        begun = asyncio.get_running_loop().time()
        assert 0 == await process.end(signal.SIGTERM)
        assert asyncio.get_running_loop().time() - begun < 5
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await follower
        assert grpc.StatusCode.UNAVAILABLE == caught.value.code()
        await agent._task
        assert [] == agent.kinds("ended")
        await federation.start_coordinator()
        status = await federation.status(lambda s: len(s.clients) == 1)
        assert "waits for 3 more clients; no agent is connected" == status.message


def test_a_wrong_setting_is_named_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["--set", "listn=x"])
    assert "unknown key 'listn'; did you mean 'listen'?" in capsys.readouterr().err


def test_a_database_out_of_reach_is_a_service_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path}/nowhere/x.db"
    assert 7 == main(["--set", f"database_url={url}", "--set", "log_level=ERROR"])
    assert "nowhere/x.db" in capsys.readouterr().err


def test_settings_come_from_file_command_line_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "coordinator.toml"
    file.write_text('listen = "0.0.0.0:1"\nheartbeat_seconds = 2\naggregators = ["a:1", "b:2"]\n')
    monkeypatch.setenv("FEDEL_DATABASE_URL", "sqlite:///from-the-environment.db")
    settings = read_config(str(file), ["listen=0.0.0.0:2"])
    assert ("0.0.0.0:2", 6.0, ("a:1", "b:2")) == (
        settings.listen,
        settings.silent_seconds,
        settings.aggregators,
    )
    assert "sqlite:///from-the-environment.db" == settings.database_url


def test_one_address_can_stand_for_all_shards() -> None:
    settings = read_config(
        None, ["shards=2", 'aggregators=["a-{shard}:1"]', 'public_aggregators=["b-{shard}.lan:1"]']
    )
    assert (("a-0:1", "a-1:1"), ("b-0.lan:1", "b-1.lan:1")) == (settings.aggregators, settings.reachable)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("aggregators=[]", "name at least one address"),
        ('public_aggregators=["a:1", "b:1"]', "public_aggregators has 2 addresses, aggregators 1"),
        ("heartbeat_seconds=0", "heartbeat_seconds is above 0"),
        ("shards=3", "shards is 3, but aggregators has 1 addresses and none with {shard}"),
        ('aggregators=["a-{shard}:1"]', "stands for all aggregators, and shards says how many"),
        ("shards=-1", "shards is 0 to 1000"),
    ],
)
def test_impossible_settings_are_refused(
    override: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(["--set", override])
    assert complaint in capsys.readouterr().err


@asynchronous
async def test_a_run_on_other_aggregators_stops_the_start(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        await federation.stop_coordinator()
        federation.aggregators.append("127.0.0.1:9")
        with pytest.raises(Exception, match="created on 1 aggregators, aggregators lists 2"):
            await federation.start_coordinator()
        federation.aggregators.pop()
