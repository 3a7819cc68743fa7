"""docs/job.md and the schemas say what the code says, and the schemas judge a job as the parser does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft7Validator

from fedel import config, job_reference, workload_reference
from fedel.data import folder
from fedel.data.registry import ENTRIES
from fedel.desk.local import read_job
from fedel.errors import ConfigError
from fedel.job import RunConfig
from fedel.models.registry import MODELS
from fedel.simulation.job import SimulationConfig
from fedel.strategies import METHODS, build
from fedel.workload_reference import options

ROOT = Path(__file__).parents[1]
SIMULATED = ["configs/simulation.toml", "examples/own_method.toml"]
FEDERATED = ["examples/own.toml", "examples/own_method.toml", "fedel/cli/demo.toml"]


def schema(name: str) -> Draft7Validator:
    return Draft7Validator(json.loads((ROOT / "docs" / f"{name}.schema.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["job.md", "job.schema.json", "simulation.schema.json"])
def test_the_pages_are_those_of_the_code(name):
    written = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert job_reference.pages()[name] == written, "the code has changed: run `make job-reference`"


def all_keys() -> list[tuple[str, job_reference.Key]]:
    tables = {"job": job_reference.federation_keys(), "simulation": job_reference.simulation_keys()}
    tables |= {name: job_reference.keys(method) for name, method in METHODS.items()}
    listed = []
    while tables:
        place, found = tables.popitem()
        listed += [(f"{place}.{key.name}", key) for key in found]
        kinds = {key.name: job_reference.table_of(key.hint) for key in found}
        tables |= {f"{place}.{name}": job_reference.keys(kind) for name, kind in kinds.items() if kind}
    return listed


def test_every_key_has_a_sentence():
    found = all_keys()
    assert {"job.fleet.slowdowns", "simulation.network.devices.up_mbps", "heterofl.widths"} <= {
        place for place, _ in found
    }
    assert [] == [place for place, key in found if not key.meaning and not job_reference.table_of(key.hint)]


@pytest.mark.parametrize("name", ["job", "simulation"])
def test_schemas_are_schemas(name):
    Draft7Validator.check_schema(schema(name).schema)


@pytest.mark.parametrize(
    ("path", "kind"), [*((path, "simulation") for path in SIMULATED), *((path, "job") for path in FEDERATED)]
)
def test_jobs_that_come_with_fedel_are_valid(path, kind):
    assert [] == [error.message for error in schema(kind).iter_errors(config.read(ROOT / path))]


def test_every_job_is_among_these():
    """A new one belongs into a list above."""
    jobs = {
        str(path.relative_to(ROOT))
        for folder in ("configs", "examples", "fedel/cli")
        for path in (ROOT / folder).glob("*.toml")
        if "strategy" in config.read(path)
    }
    assert {*SIMULATED, *FEDERATED} == jobs


@pytest.mark.parametrize("kind", ["job", "simulation"])
def test_a_job_with_every_key_at_its_default_is_valid(kind):
    table = (RunConfig() if kind == "job" else SimulationConfig()).table()
    assert [] == list(schema(kind).iter_errors(json.loads(json.dumps(table))))


BOTH = [
    ({}, True),
    ({"seed": 3, "rounds": {"num_rounds": 5, "over_select": 2}}, True),
    ({"sed": 3}, False),
    ({"seed": "3"}, False),
    ({"seed": True}, False),
    ({"rounds": 5}, False),
    ({"rounds": {"num_round": 5}}, False),
    ({"rounds": {"num_rounds": "5"}}, False),
    ({"rounds": {"late": "weigh"}}, True),
    ({"rounds": {"late": "wait"}}, False),
    ({"budget": {"policy": "slowest"}}, False),
    ({"budget": {"pace": ""}}, True),
    ({"work": {"lr": 1}}, True),
    ({"work": {"lr": "fast"}}, False),
    ({"work": {"optimiser": "adamw"}}, True),
    ({"work": {"optimiser": "adam"}}, False),
    ({"protection": {"secure": 1}}, False),
    ({"workload": {"model_options": {"width": 0.5, "anything": [1]}}}, True),
    ({"workload": {"model_options": 0.5}}, False),
    ({"strategy": {"name": "fedel", "beta": 0.4}}, True),
    ({"strategy": {"name": "fedel", "betta": 0.4}}, False),
    ({"strategy": {"name": "fedel", "beta": "much"}}, False),
    ({"strategy": {"name": "fedavg", "beta": 0.4}}, False),
    ({"strategy": {"name": "fedle"}}, False),
    ({"strategy": {"beta": 0.4}}, False),
    ({"strategy": {"name": "heterofl", "widths": [1.0, 0.5]}}, True),
    ({"strategy": {"name": "heterofl", "widths": 0.5}}, False),
    ({"strategy": {"name": "fedprox", "mu": 0.1, "base": {"name": "fedel", "steps": "fit"}}}, True),
    ({"strategy": {"name": "fedprox", "base": {"name": "fedel", "steps": "all"}}}, False),
    ({"strategy": {"name": "fedprox", "base": "fedel"}}, False),
]


def refused(parse, *arguments) -> bool:
    try:
        job = parse(*arguments)
        build((job.run if isinstance(job, SimulationConfig) else job).strategy)
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize(
    ("table", "good"),
    [
        *BOTH,
        ({"fleet": {"slowdowns": [1, 2.5]}}, True),
        ({"fleet": {"slowdowns": 2}}, False),
        ({"fleet": {"base": "orin"}}, False),
        ({"partition": {"alpha": 0.5}}, False),
    ],
    ids=str,
)
def test_schema_and_parser_agree_on_jobs(table, good, tmp_path):
    (tmp_path / "job.toml").write_text(config.write(table))
    assert good == (not refused(lambda: read_job(tmp_path / "job.toml", [])[0]))
    assert good == schema("job").is_valid(table)


@pytest.mark.parametrize(
    ("table", "good"),
    [
        *BOTH,
        ({"scope": "train", "partition": {"alpha": 0.5}}, True),
        ({"scope": "forward"}, False),
        ({"compute": "faster"}, False),
        ({"partition": {"method": "dirichlet-equal"}}, True),
        ({"partition": {"method": "even"}}, False),
        ({"fleet": {"slowdowns": [1, 2]}}, False),
        ({"fleet": {"counts": {"orin": 10}}}, True),
        ({"fleet": {"counts": {"orin": "ten"}}}, False),
        ({"fleet": {"counts": 10}}, False),
        ({"fleet": {"counts": {"orin": 10}}, "partition": 10}, False),
        ({"fleet": {"types": {"pi": {"slowness": 9}}}}, True),
        ({"fleet": {"types": {"pi": {"slownes": 9}}}}, False),
        ({"network": {"devices": {"orin": {"up_mbps": 5}}}}, True),
        ({"network": {"devices": {"orin": 5}}}, False),
    ],
    ids=str,
)
def test_schema_and_parser_agree_on_simulations(table, good):
    assert good == (not refused(SimulationConfig.parse, table))
    assert good == schema("simulation").is_valid(table)


def test_a_job_of_your_own_method_is_valid():
    """Its options are not known to the schema."""
    assert schema("job").is_valid({"strategy": {"name": "own:Method", "anything": 1}})


@pytest.mark.parametrize("path", sorted({*SIMULATED, *FEDERATED}))
def test_jobs_name_their_schema(path):
    line = (ROOT / path).read_text(encoding="utf-8").partition("\n")[0]
    assert ((ROOT / path).parent / line.removeprefix("#:schema ")).is_file()


def test_every_option_of_a_model_or_data_set_has_a_sentence():
    """And every sentence belongs to an option."""
    models = [key for model in MODELS.values() for key in options(model, workload_reference.OF_MODELS)]
    loaders = [folder.image_folder, *(entry.load for entry in ENTRIES.values())]
    data = [key for load in loaders for key in options(load, workload_reference.OF_DATA)]
    for found, meanings in ((models, workload_reference.OF_MODELS), (data, workload_reference.OF_DATA)):
        assert [] == [key.name for key in found if not key.meaning]
        assert meanings.keys() == {key.name for key in found}


def test_models_and_data_sets_are_on_the_page_with_their_defaults():
    page = job_reference.pages()["job.md"]
    headings = {
        name for line in page.splitlines() if line.startswith("### ") for name in re.findall("`(.*?)`", line)
    }
    assert {*MODELS, *ENTRIES, "folder:PATH"} <= headings
    _, _, vgg = page.partition("### `vgg16`")
    assert "| `width` | number | `1.0` | Every number of channels" in vgg.partition("###")[0]
    assert "| `hidden_layers` | list: whole number | `[]` |" in vgg.partition("###")[0]
