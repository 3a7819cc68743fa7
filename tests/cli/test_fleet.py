"""``fedel fleet`` against a real coordinator: names whole, in 80 columns, in a pipe, and as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve
from fedel_coordinator.sessions import Device
from fedel_coordinator.store import AgentRow

from fedel.cli import fleet
from fedel.cli.agent_rows import COLUMNS, table_lines
from fedel.cli.main import main
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.protocol import PROTOCOL

LONG = "a-device-with-a-long-name-that-must-stay-whole-0001"
BOOM = "RuntimeError: boom " + "x" * 300


class Server:
    """A coordinator in a thread, whose list of agents is as if they had been here."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ready, self._stop = folder, Event(), Event()
        self.address = ""
        self._thread = Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        config = CoordinatorConfig(listen="127.0.0.1:0", database_url=f"sqlite:///{self._folder}/c.db")
        async with AsyncExitStack() as stack:
            self.address, self.coordinator = await stack.enter_async_context(serve(config))
            known = self.coordinator.fleet
            device = Device("jetson-orin-nano", 8_000_000_000, "0.1.0")
            known.opened(LONG, device, {"gpu": "orin", "site": "roof"}, PROTOCOL, time.time() + 30 * 86_400)
            known.opened("agent-2", device, {}, PROTOCOL)
            known.failed("agent-2", "night-1", 3, BOOM, "Traceback\n  File y\nboom")
            measured = {"up_rate": 1.25e6, "down_rate": 11e6, "last_seen": 1.0}
            known._put(AgentRow(**{**vars(known.row("agent-2")), **measured}))
            self._ready.set()
            await asyncio.to_thread(self._stop.wait)

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("fleet")) as made:
        yield made


def fedel(server: Server, *words: str) -> int:
    return main(["fleet", *words, "--coordinator", server.address])


def test_in_a_pipe_each_agent_is_one_whole_line(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == fedel(server)
    head, first, second, foot = capsys.readouterr().out.splitlines()
    assert all(column in head for column in COLUMNS)
    assert first.startswith(LONG)
    for cell in ("away", "jetson-orin-nano", "0.1.0", "8.0 GB", "30 d", "gpu=orin,site=roof"):
        assert cell in first
    for cell in ("agent-2", "1.2 MB/s 11.0 MB/s", "night-1, round 4: RuntimeError: boom x"):
        assert cell in second
    assert len(second) < 400, "a long error is cut"
    assert "2 agents, 0 connected" == foot


@pytest.mark.parametrize("width", [80, 100])
def test_on_a_narrow_screen_names_are_whole_and_nothing_is_wider(width: int) -> None:
    agents = [
        pb.AgentStatus(
            name=LONG[:30], state="ready", last_seen=1000, device_type="linux-x86", memory_bytes=10**9
        ),
        pb.AgentStatus(
            name="b",
            state="draining",
            labels={f"label-{n}": "value" for n in range(12)},
            last_error=pb.AgentError(at=900, run="night", round_num=-1, message="word " * 100),
        ),
    ]
    lines = table_lines(agents, 1000, width)
    assert max(map(len, lines)) <= width
    assert any(LONG[:30] in line for line in lines)
    assert any("memory 1.0 GB" in line for line in lines)
    assert any("label-0=value" in line for line in lines)
    assert len(table_lines(agents, 1000, 0)) == 3, "a pipe has one line per agent"


def test_json_has_numbers(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == fedel(server, "--json", "--selector", "!gpu")
    (found,) = json.loads(capsys.readouterr().out)
    assert ("agent-2", 1.25e6, 8_000_000_000, None, 1.0) == (
        found["name"],
        found["up_bytes_per_second"],
        found["memory_bytes"],
        found["certificate_end"],
        found["last_seen"],
    )
    assert (3, "") == (found["last_error"]["round"], found["last_error"]["trace"])


def test_show_has_the_traceback(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == fedel(server, "show", "agent-2")
    said = capsys.readouterr().out
    assert "night-1, round 4: RuntimeError: boom" in said
    assert "x" * 300 in said, "all of it"
    assert said.endswith("Traceback\n  File y\nboom\n")


def test_labels_cordon_drain_and_uncordon(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == fedel(server, "label", "agent-2", "site=lab", "rack=7")
    assert "agent-2: rack=7,site=lab\n" == capsys.readouterr().out
    assert 0 == fedel(server, "drain", "--selector", "site=lab")
    assert "agent-2 is cordoned and drained: it has no task, and can be stopped\n" == capsys.readouterr().out
    assert 0 == fedel(server, "uncordon", "agent-2")
    assert 0 == fedel(server, "label", "agent-2", "site-", "rack-")
    assert capsys.readouterr().out.endswith("agent-2: -\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show"], "needs the name of one agent"),
        (["show", "nobody"], "no agent 'nobody' has had a session here"),
        (["list", "x"], "`fedel fleet show x` shows one agent"),
        (["label", "agent-2"], "key=value"),
        (["label", "agent-2", "gpu"], "write key=value to set it, or key- to drop it"),
        (["label", "agent-2", "name=x"], "this key is taken by the agent's own name"),
        (["cordon"], "needs the names of agents, or --selector"),
        (["--selector", "gpu="], "'gpu=' is no condition"),
        (["profile", "agent-2"], "is away"),
    ],
)
def test_what_cannot_be_done_is_said(
    server: Server, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert 0 != fedel(server, *words)
    assert said in capsys.readouterr().err


def test_nobody_yet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody(*_: Any, **__: Any) -> tuple[list[pb.AgentStatus], float]:
        return [], 0.0

    monkeypatch.setattr(fleet, "list_agents", nobody)
    assert 0 == main(["fleet"])
    assert "no agent has connected yet" in capsys.readouterr().out
