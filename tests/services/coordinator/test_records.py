"""The records of rounds and runs, and the directory they are written to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from fedel_coordinator.persistence import plan_from_json, plan_to_json, spec_from_json, spec_to_json
from fedel_coordinator.run_directory import RunDirectory
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel import config as toml
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.roles.planner import Handover, RoundPlanner
from fedel.serialisation import from_json, to_json
from fedel.types import ClientView, TimingProfile
from tests.services.coordinator.support import RUN, SPEC, Federation, asynchronous, run_config, trainers
from tests.strategies.fakes import frozen_spec


@asynchronous
async def test_the_record_of_a_round_says_where_time_and_bytes_went(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=2, min_clients=2))
        federation.start_agents(2, accuracies={1: 0.25, 2: 0.5})
        first, second = await federation.finished()
    phases = {"download": 0.5, "probe": 0.0, "train": 2.0, "upload": 1.0, "wait": 0.0}
    assert phases == first.clients[0].phases
    assert {*phases, "fold", "commit", "evaluate"} == set(first.phases)
    assert (2.0, 14) == (first.phases["train"], first.bytes_down)
    assert first.bytes_up == sum(entry.bytes_up for entry in first.clients) > 0
    assert ["fake", "fake"] == [entry.device_type for entry in first.clients]
    assert 0 < first.collect_seconds <= first.latency_seconds
    assert second.opened_at >= first.opened_at + first.latency_seconds
    assert (1, 2) == (first.version, second.version)
    assert {t.name for t in SPEC.tensors} == set(first.tensor_clients)
    for name, count in second.tensor_clients.items():
        before = first.tensor_untrained_rounds[name]
        assert (0 if count else before + 1) == second.tensor_untrained_rounds[name]


@asynchronous
async def test_a_run_leaves_a_directory_that_others_can_read(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    async with Federation(tmp_path, runs_dir=runs) as federation:
        config = run_config(num_rounds=2, min_clients=2)
        await federation.create(config)
        federation.start_agents(2, accuracies={1: 0.5, 2: 0.25})
        records = await federation.finished()
        await federation.stop_coordinator()
    assert config == RunConfig.parse(toml.read(runs / RUN / "config.toml"))
    assert records == _lines(runs / RUN / "rounds.jsonl")
    result = json.loads((runs / RUN / "result.json").read_text())
    assert ("finished", "fedel", 1, 2) == tuple(result[k] for k in ("phase", "strategy", "seed", "rounds"))
    assert (0.25, 0.5, 0, 1) == tuple(
        result[k] for k in ("accuracy", "best_accuracy", "best_round", "best_version")
    )
    assert sum(record.bytes_up for record in records) == result["bytes_up"]
    assert {"client-0", "client-1"} == set(result["clients"])
    assert result["wall_seconds"] > 0


@asynchronous
async def test_files_that_were_lost_or_cut_off_are_written_again_at_the_next_start(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    async with Federation(tmp_path, runs_dir=runs) as federation:
        await federation.create(run_config(num_rounds=3, evaluate_every=0))
        agents = federation.start_agents(3)
        await agents[0].until("closed", round_num=1)
        for agent in agents:
            await agent.drop()
        await federation.stop_coordinator()
        (runs / RUN / "rounds.jsonl").write_text('{"round": 0')
        await federation.start_coordinator()
        for agent in agents:
            agent.start()
        records = await federation.finished()
        await federation.stop_coordinator()
        (runs / RUN / "result.json").unlink()
        await federation.start_coordinator()
        assert 3 == json.loads((runs / RUN / "result.json").read_text())["rounds"]
    assert records == _lines(runs / RUN / "rounds.jsonl")


@asynchronous
async def test_a_run_goes_on_if_its_directory_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where a folder should be")
    async with Federation(tmp_path, runs_dir=tmp_path / "runs") as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1, evaluate_every=0))
        federation.agent("client-0")
        assert 1 == len(await federation.finished())


def _lines(path: Path) -> list[RoundRecord]:
    return [RoundRecord.from_json(line) for line in path.read_text().splitlines()]


def test_what_the_store_keeps_as_json_comes_back_the_same() -> None:
    clients = trainers()
    views = [ClientView(name, each.num_samples, each.profile) for name, each in sorted(clients.items())]
    handover = Handover(2, {"a": [1, {"b": 0.1}]}, {"w": 1e-17})
    plan = RoundPlanner(run_config(), SPEC).plan(handover, views)
    assert plan == plan_from_json(plan_to_json(plan), handover.global_importance)
    assert handover == from_json(Handover, to_json(handover), "test")
    for spec in (SPEC, frozen_spec()):
        assert spec == spec_from_json(spec_to_json(spec))
    profile = clients["client-3"].profile
    assert profile == from_json(TimingProfile, to_json(profile), "test")


def test_a_record_is_json_for_every_reader() -> None:
    text = to_json({"loss": math.nan, "list": (1.5, -math.inf), "inner": {"x": math.inf, "y": "NaN"}})
    assert {"loss": None, "list": [1.5, None], "inner": {"x": None, "y": "NaN"}} == json.loads(text)


_KEYS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
_VALUES = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.booleans(),
    st.lists(st.integers(0, 9), max_size=3),
    st.lists(st.dictionaries(_KEYS, st.booleans(), max_size=2), max_size=2),
)


_TABLES = st.dictionaries(_KEYS, _VALUES | st.dictionaries(_KEYS, _VALUES, max_size=3), max_size=4)


@settings(max_examples=60, deadline=None)
@given(_TABLES)
def test_toml_comes_back_the_same(table: dict[str, Any]) -> None:
    assert table == toml.tomllib.loads(toml.write(table))


def test_a_directory_is_started_again(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "one")
    directory.start({"seed": 1}, ['{"round": 0}'])
    directory.append('{"round": 1}')
    directory.start({"seed": 1, "none": None}, ['{"round": 0}'])
    assert '{"round": 0}\n' == (tmp_path / "one" / "rounds.jsonl").read_text()
    assert {"seed": 1} == toml.read(tmp_path / "one" / "config.toml")
    assert not directory.finished


@asynchronous
async def test_an_empty_database_beside_folders_of_runs_is_noticed(tmp_path: Path, caplog: Any) -> None:
    async with Federation(tmp_path, runs_dir=tmp_path / "runs") as federation:
        assert "holds no run" not in caplog.text
        await federation.create(run_config())
        await federation.stop_coordinator()
        for file in tmp_path.glob("coordinator.db*"):
            file.unlink()
        await federation.start_coordinator()
        assert "holds no run" in caplog.text
        assert RUN in caplog.text
