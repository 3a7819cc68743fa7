"""The configuration files that come with the project hold every key, and nothing that is not one."""

import dataclasses
from pathlib import Path

import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.config import CoordinatorConfig
from fedel_edge.config import AgentConfig

from fedel import config
from fedel.desk.local import read_job
from fedel.errors import ConfigError
from fedel.job import Protection, RunConfig
from fedel.types import UploadSettings

ROOT = Path(__file__).parents[1]
FOR_SCRIPTS = {"port_file", "http_port_file"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("coordinator", CoordinatorConfig), ("aggregator", AggregatorConfig), ("agent", AgentConfig)],
)
def test_every_key_is_explained(name, kind):
    table = config.read(ROOT / "configs" / f"{name}.toml")
    config.parse(kind, table, name)
    assert {field.name for field in dataclasses.fields(kind)} - FOR_SCRIPTS == table.keys()


@pytest.mark.parametrize("path", ["fedel/cli/demo.toml", "examples/own.toml"])
def test_jobs_parse(path):
    job, fleet = read_job(ROOT / path, [])
    assert job.rounds.num_rounds > 0
    assert fleet.slowdowns


@pytest.mark.parametrize(("table", "kind"), [("protection", Protection), ("upload", UploadSettings)])
def test_the_simulation_explains_every_key(table, kind):
    lines = (ROOT / "configs" / "simulation.toml").read_text(encoding="utf-8").partition(f"# [{table}]")[2]
    section = lines.partition("\n\n")[0].splitlines()[1:]
    keys = [line.removeprefix("# ").partition(" =")[0] for line in section]
    assert [field.name for field in dataclasses.fields(kind)] == keys


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"upload": {"compression": "zip"}}, "is not one of: none, fp16, int8, topk"),
        ({"upload": {"compression": "topk", "share": 0}}, "more than 0 and at most 1"),
        ({"upload": {"compression": "int8"}, "protection": {"secure": True}}, "upload.compression = 'none'"),
        ({"upload": {"compresion": "int8"}}, "did you mean 'compression'"),
    ],
)
def test_uploads_that_make_no_sense_are_refused(table, said):
    with pytest.raises(ConfigError, match=said):
        RunConfig.parse(table)


@pytest.mark.parametrize("key", ["num_rounds", "over_select", "min_clients", "max_samples", "max_repeats"])
def test_a_job_that_asks_for_nothing_is_refused(key):
    """With no client to wait for, a round was planned for nobody."""
    with pytest.raises(ConfigError, match=rf"{key} = 0.*: at least 1"):
        RunConfig.parse({"rounds": {key: 0}})
