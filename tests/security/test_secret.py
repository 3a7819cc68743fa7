"""Servers in plain text that answer only those who know the federation's secret."""

from __future__ import annotations

import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as aggregating
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as coordinating
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from grpc import aio

from fedel.desk.local import Federation, LocalFleet
from fedel.desk.submit import create, follow, list_runs, save_model
from fedel.errors import ConfigError
from fedel.plugins import Allowed
from fedel.security import secret
from fedel.security.identity import RULES
from fedel.security.tls import Tls
from fedel.training.settings import DataPart
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.channel import connect, with_metadata
from tests.agents.stand_ins import running
from tests.federation.support import job_of
from tests.federation.trainers import scale_of, spec_of
from tests.security.support import refusal
from tests.services.coordinator.support import asynchronous
from tests.strategies.fakes import initial_model

CALLS = sorted(method for method in RULES if "Enrolment" not in method)


@asynccontextmanager
async def servers(folder: Path, tls: Tls) -> AsyncIterator[dict[str, str]]:
    """Addresses, by the name of the service."""
    async with AsyncExitStack() as stack:
        bulk, _ = await stack.enter_async_context(
            aggregating(AggregatorConfig("127.0.0.1:0", folder / "a", tls=tls))
        )
        config = CoordinatorConfig(
            "127.0.0.1:0", aggregators=(bulk,), database_url=f"sqlite:///{folder / 'c.db'}", tls=tls
        )
        address, _ = await stack.enter_async_context(coordinating(config))
        yield {"fedel.v1.CoordinatorService": address, "fedel.v1.AggregatorService": bulk}


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    secret.create(tmp_path / "secret")
    return Tls(secret_file=str(tmp_path / "secret"))


async def empty_call(channel: aio.Channel, method: str) -> Any:
    return await channel.stream_stream(method)(iter([b""])).read()


async def answer_to(channel: aio.Channel, method: str) -> tuple[str, str]:
    """On a busy machine a caller that is still writing may see its stream reset before it sees the status."""
    for _ in range(5):
        answer = await refusal(empty_call(channel, method))
        if answer != ("INTERNAL", ""):
            break
    return answer


@pytest.mark.parametrize("guess", ["", "a guess of somebody else", "x" * 43])
@asynchronous
async def test_every_call_of_a_stranger_is_refused(tmp_path: Path, tls: Tls, guess: str) -> None:
    async with servers(tmp_path, tls) as made:
        for service, address in made.items():
            async with with_metadata(aio.insecure_channel(address), guess) as channel:
                for method in CALLS:
                    if service in method or "fedel" not in method:
                        assert ("UNAUTHENTICATED", "secret") == await answer_to(channel, method), method


def test_another_process_is_refused(tmp_path: Path) -> None:
    """What `fedel run` starts, and `fedel status` of somebody who can reach its port."""
    with Federation(tmp_path / "f", tmp_path, LocalFleet((1.0,))) as federation:
        words = [sys.executable, "-m", "fedel.cli.main", "runs", "--coordinator", federation.coordinator]
        stranger = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (7, "") == (stranger.returncode, stranger.stdout)
        assert "does not know the secret of this federation" in stranger.stderr
        environment = {secret.VARIABLE: federation.tls.secret_file}
        owner = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert (0, "no runs yet") == (owner.returncode, owner.stdout[:11])
        modes = [path.stat().st_mode for path in (tmp_path / "f" / "state", Path(federation.tls.secret_file))]
        assert [0o700, 0o600] == [stat.S_IMODE(mode) for mode in modes]


@asynchronous
async def test_a_run_with_a_secret(tmp_path: Path, tls: Tls) -> None:
    job = job_of({"name": "fedel"}, 1, num_rounds=2)
    spec = spec_of(scale_of(job))
    async with servers(tmp_path, tls) as made:
        address = made["fedel.v1.CoordinatorService"]
        config = AgentConfig(
            address, "client-0", tmp_path / "state", data=DataPart(0, 1), code=Allowed(("tests",)), tls=tls
        )
        async with running(Agent(config)):
            await create(address, "night", job, spec, initial_model(spec), tls)
            last = await follow(address, "night", lambda _: None, tls)
        assert (pb.RUN_PHASE_FINISHED, 2) == (last.phase, last.model_version), last.message
        await save_model(address, "night", tmp_path / "model.safetensors", tls)


@asynchronous
async def test_the_environment_names_the_file(
    tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret.VARIABLE, tls.secret_file)
    async with servers(tmp_path, Tls()) as made:
        assert [] == await list_runs(made["fedel.v1.CoordinatorService"])
        monkeypatch.delenv(secret.VARIABLE)
        async with connect(made["fedel.v1.AggregatorService"]) as channel:
            answer = await refusal(empty_call(channel, "/fedel.v1.AggregatorService/GetModel"))
            assert ("UNAUTHENTICATED", "secret") == answer


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (None, 0o600, "no such file; make a secret there"),
        ("x" * 43, 0o640, "others can read this secret .mode 640.: chmod 600"),
        ("short", 0o600, "at least 16 letters"),
        ("x" * 20 + " y", 0o600, "no spaces"),
        ("ü" * 43, 0o600, "cannot be read as a secret"),
    ],
)
def test_files_that_hold_no_secret(tmp_path: Path, text: str | None, mode: int, words: str) -> None:
    path = tmp_path / "secret"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        Tls(secret_file=str(path)).secret  # noqa: B018
