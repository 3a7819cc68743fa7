"""The operator's desk: runs of a federation that are looked at, stopped, fetched and deleted by command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fedel.api.fetching import check_folder
from fedel.cli.main import main
from fedel.cli.run_actions import seconds_of
from fedel.errors import ConfigError
from fedel.job import RunConfig
from fedel.report import runs as run_directories
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.support import until
from tests.services.coordinator.support import RUN, Federation, asynchronous, run_config, trainers

CONFIG = run_config(num_rounds=2, min_clients=1, evaluate_every=0)


class Desk:
    """The ``fedel`` command, in a thread."""

    def __init__(self, federation: Federation, capsys: Any) -> None:
        self._at, self._capsys = ["--coordinator", federation.address], capsys

    async def __call__(self, *words: str, code: int = 0) -> str:
        assert code == await asyncio.to_thread(main, [*words, *self._at]), self._capsys.readouterr()
        told = self._capsys.readouterr()
        return str(told.err if code else told.out)


@asynccontextmanager
async def desk_of(tmp_path: Path, capsys: Any, **settings: Any) -> AsyncIterator[tuple[Federation, Desk]]:
    async with Federation(tmp_path / "servers", **settings) as federation:
        yield federation, Desk(federation, capsys)


@asynchronous
async def test_status_without_a_run_names_the_agents(tmp_path: Path, capsys: Any) -> None:
    async with desk_of(tmp_path, capsys) as (federation, fedel):
        assert (await fedel("status")).startswith("no runs yet; 0 agents connected. `fedel run JOB.toml")
        assert "{}\n" == await fedel("status", "--json")
        federation.start_agents(2)
        await until(lambda: len(federation.coordinator.sessions.clients) == 2, "both agents")
        assert "2 agents connected: client-0, client-1." in await fedel("status")


@asynchronous
async def test_status_in_a_pipe_shows_every_client_and_the_newest_round(tmp_path: Path, capsys: Any) -> None:
    async with desk_of(tmp_path, capsys) as (federation, fedel):
        names = [f"jetson-orin-nano-in-the-north-hall-{n:02}" for n in range(3)]
        for name, trainer in zip(names, trainers().values(), strict=False):
            federation.agent(name, trainer)
        await federation.create(run_config(num_rounds=4, min_clients=3, evaluate_every=0))
        await federation.finished()
        lines = (await fedel("status")).splitlines()
        assert f"{RUN}  fedel  round 4 of 4  finished" in lines[0]
        assert names == [line.split()[0] for line in lines if line.startswith("jetson")]
        assert max(map(len, lines[:-2])) <= 80
        assert lines[-2].startswith("round   4/4") or lines[-1].startswith("round   4/4")


@asynchronous
async def test_stop_says_after_which_round_and_keeps_the_reason(tmp_path: Path, capsys: Any) -> None:
    async with desk_of(tmp_path, capsys) as (federation, fedel):
        await federation.create(run_config(evaluate_every=0, min_clients=1))
        agent = federation.agent("client-0")
        agent.hold.clear()
        await agent.until("task", round_num=0)
        assert f"{RUN}: paused, after round 1: paused by an operator: lunch;" in await fedel(
            "runs", "pause", RUN, "--why", "lunch"
        )
        assert f"{RUN}: running\n" == await fedel("runs", "resume", RUN)
        assert f"{RUN} stops after round 1\n" == await fedel("runs", "stop", RUN, "--why", "wrong data")
        agent.hold.set()
        await federation.finished()
        assert "stopped after round 1: wrong data" in await fedel("runs")
        assert "stopped after round 1: wrong data" in await fedel("status")
        told = json.loads(await fedel("status", "--json"))
        assert "stopped after round 1: wrong data" == told["message"]


@asynchronous
async def test_a_finished_run_is_fetched_from_anywhere_and_again(tmp_path: Path, capsys: Any) -> None:
    async with desk_of(tmp_path, capsys) as (federation, fedel):
        await federation.create(CONFIG)
        federation.agent("client-0")
        await federation.finished()
        out, place = ("--out", str(tmp_path / "desk")), tmp_path / "desk" / RUN
        assert f"{place}: run '{RUN}', finished, version 2\n" == await fedel("runs", "fetch", RUN, *out)
        stored = run_directories.load(place)
        assert (2, "finished", CONFIG.rounds) == (
            len(stored.rounds),
            stored.phase,
            RunConfig.parse(stored.settings).rounds,
        )
        before = {file.name: file.stat().st_mtime_ns for file in place.iterdir()}
        assert {"config.toml", "model.safetensors", "result.json", "rounds.jsonl"} == before.keys()
        (place / "rounds.jsonl").unlink()
        await fedel("runs", "fetch", RUN, *out)
        after = {file.name: file.stat().st_mtime_ns for file in place.iterdir()}
        assert ["rounds.jsonl"] == [name for name in before if before[name] != after[name]]
        assert 2 == len(run_directories.load(place).rounds)
        assert "no run 'nothing' here; `fedel runs` lists them" in await fedel(
            "runs", "fetch", "nothing", *out, code=7
        )


@asynchronous
async def test_a_run_that_goes_on_is_fetched_when_it_ends(tmp_path: Path, capsys: Any) -> None:
    async with desk_of(tmp_path, capsys) as (federation, fedel):
        await federation.create(CONFIG)
        fetching = asyncio.create_task(fedel("runs", "fetch", RUN, "--out", str(tmp_path / "desk")))
        federation.agent("client-0")
        assert "finished, version 2" in await fetching


@asynchronous
async def test_what_was_deleted_is_printed(tmp_path: Path, capsys: Any) -> None:
    async with desk_of(tmp_path, capsys) as (federation, fedel):
        for name in ("one", "two"):
            await federation.create(CONFIG, name)
            await federation.control(pb.RUN_ACTION_STOP_NOW, name)
        await federation.create(CONFIG, "busy")
        assert (await fedel("runs", "delete", "one", "--dry-run")).startswith(
            "would delete one: 0 rounds, 0.01 MB"
        )
        assert (await fedel("runs", "delete", "one")).startswith("deleted one: 0 rounds, ")
        assert "one: there is no such run, and nothing of it to delete" in await fedel("runs", "delete", "one")
        assert "not over: busy. Nothing was deleted" in await fedel("runs", "delete", "two", "busy", code=7)
        assert "no run ended more than 1d ago: nothing to delete\n" == await fedel(
            "runs", "delete", "--older-than", "1d"
        )
        told = json.loads(await fedel("runs", "delete", "--older-than", "0s", "--json"))
        assert ["two"] == [each["run"] for each in told]
        assert ["busy"] == [row["run"] for row in json.loads(await fedel("runs", "--json"))]
        assert "needs the name of a run" in await fedel("runs", "delete", code=2)


def test_a_time_is_a_number_and_a_unit() -> None:
    assert [172_800.0, 90.0] == [seconds_of("2d"), seconds_of("1.5m")]
    for wrong in ("30", "d", "-1d", "1 year"):
        with pytest.raises(ConfigError, match="such as 30d or 12h"):
            seconds_of(wrong)


def test_a_folder_is_taken_up_again_if_it_is_empty_or_of_the_same_run(tmp_path: Path) -> None:
    from fedel import config

    check_folder(tmp_path / "new", CONFIG.table())
    (tmp_path / "night").mkdir()
    check_folder(tmp_path / "night", CONFIG.table())
    (tmp_path / "night" / "input.json").write_text("{}")
    (tmp_path / "night" / "config.toml").write_text(config.write(CONFIG.table()))
    check_folder(tmp_path / "night", CONFIG.table_to_send())
    with pytest.raises(ConfigError, match="holds another run"):
        check_folder(tmp_path / "night", run_config(num_rounds=9).table())
    (tmp_path / "night" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="or other files"):
        check_folder(tmp_path / "night", CONFIG.table())
