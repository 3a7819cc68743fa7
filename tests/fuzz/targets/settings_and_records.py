"""Files that people write or read: jobs, configurations, profiles, records of rounds and results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.config import CoordinatorConfig
from fedel_edge.config import AgentConfig

from fedel import config, testing
from fedel.job import RunConfig
from fedel.records import RoundRecord, RunResult
from fedel.report import runs
from fedel.report.about import about
from fedel.report.figures import table
from fedel.report.verdicts import verdicts
from fedel.roles.planner import Handover
from fedel.serialisation import from_json, to_json
from fedel.simulation.job import SimulationConfig
from fedel.strategies import build
from fedel.training import profile_io
from fedel.types import Plan
from tests.fuzz import samples
from tests.fuzz.mutate import json_case, mutate_bytes, toml_case
from tests.fuzz.target import Read, Target, reads_file
from tests.report.fakes import client_record, result, round_record

CONFIGS = Path(__file__).parents[3] / "configs"


def _settings(name: str, kind: type, file: str) -> Target:
    def read(path: Path) -> object:
        return config.parse(kind, config.read(path), str(path))

    return Target(name, lambda: [(CONFIGS / file).read_bytes()], toml_case, reads_file(file, read))


def _job(path: Path) -> object:
    job = RunConfig.parse(config.read(path), str(path))
    return build(job.strategy), config.write(job.table())


def _simulation(path: Path) -> object:
    return SimulationConfig.parse(config.read(path), str(path)).table()


def _round() -> bytes:
    clients = tuple(
        client_record(client=name, window=(1, 2), phases={"train": 1.0}) for name in samples.CLIENTS
    )
    return (round_record(clients=clients, accuracy=0.5, refused={"x": "late"}).to_json() + "\n").encode()


def _rounds_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    line = json_case(rng, valid.rstrip(b"\n"), others)
    return rng.choice((line + b"\n", valid + line, line))


def _run_folder(name: str) -> Callable[[Path], Read]:
    """A stored run of which one file is the case."""

    def prepare(folder: Path) -> Read:
        (folder / "rounds.jsonl").write_bytes(_round())
        (folder / "result.json").write_text(result().to_json(), encoding="utf-8")
        (folder / "config.toml").write_text(config.write(samples.job()), encoding="utf-8")

        def read(data: bytes) -> object:
            (folder / name).write_bytes(data)
            run = runs.load(folder)
            return about([run]), verdicts([run]), table([run]), run.clients(), run.seconds_by_phase(3)

        return read

    return prepare


def _json(name: str, kind: type, valid: Callable[[], object]) -> Target:
    return Target(
        name, lambda: [to_json(valid()).encode()], json_case, lambda _: lambda data: from_json(kind, data, name)
    )


def _profile() -> bytes:
    return profile_io.to_json(replace(testing.profile(), widths=samples.WIDTHS)).encode()


def _load_profile(path: Path) -> object:
    return profile_io.load_profile(path, samples.SPEC)


SETTINGS_AND_RECORDS = (
    Target("job", lambda: [config.write(samples.job()).encode()], toml_case, reads_file("job.toml", _job)),
    Target(
        "simulation",
        lambda: [(CONFIGS / "simulation.toml").read_bytes()],
        toml_case,
        reads_file("simulation.toml", _simulation),
    ),
    _settings("agent_settings", AgentConfig, "agent.toml"),
    _settings("aggregator_settings", AggregatorConfig, "aggregator.toml"),
    _settings("coordinator_settings", CoordinatorConfig, "coordinator.toml"),
    Target("profile", lambda: [_profile()], json_case, reads_file("profile.json", _load_profile)),
    Target("rounds", lambda: [_round()], _rounds_case, _run_folder("rounds.jsonl")),
    Target("result", lambda: [result().to_json().encode()], json_case, _run_folder("result.json")),
    _json("round_record", RoundRecord, lambda: from_json(RoundRecord, _round(), "")),
    _json("run_result", RunResult, result),
    _json("plan", Plan, lambda: Plan((samples.task(),), 3.0, 60.0, {"a": [1, "b"]})),
    _json("handover", Handover, lambda: Handover(reports={"client-0": samples.report()})),
    Target(
        "override",
        lambda: [b"rounds.num_rounds=3"],
        mutate_bytes,
        lambda _: lambda data: config.override_key({}, data.decode("utf-8", "replace")),
    ),
)
