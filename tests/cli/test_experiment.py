import argparse
import json

import pytest

from fedel.cli import experiment
from fedel.errors import ConfigError
from fedel.experiments.scale import SCALES


def fedel_experiment(*words):
    parser = argparse.ArgumentParser()
    experiment.add_parser(parser.add_subparsers(dest="verb"))
    arguments = parser.parse_args(["experiment", *map(str, words)])
    return arguments.run(arguments)


def test_list_run_reuse_report(tmp_path, capfd):
    options = ("--scale", "ci", "--tasks", "cifar10", "--seeds", "1", "--out", tmp_path)
    assert 0 == fedel_experiment("resources", *options, "--list", "--json")
    listed = json.loads(capfd.readouterr().out)
    assert (10, {"missing"}) == (len(listed), {run["state"] for run in listed})

    assert 0 == fedel_experiment("devices", *options, "--executor", "serial")
    said = capfd.readouterr()
    assert "[3/3] cifar10-fedel-1-" in said.err
    assert "left for all" in said.err
    assert "3 of 3 runs are done" in said.out
    assert "<svg" in (tmp_path / "report.html").read_text()

    assert 0 == fedel_experiment("resources", *options, "--only-report", "--json")
    found = json.loads(capfd.readouterr().out)
    assert 3 == sum(run["state"] == "done" for run in found["runs"])
    (section,) = found["sections"]
    memory = {(r["method"], r["device"]): r["MB"] for r in section["tables"][0]["rows"]}
    assert 0 < memory["fedel", "xavier"] < memory["fedavg", "xavier"]
    assert "cifar10 timelyfl, seed 1" in section["missing"]

    assert 0 == fedel_experiment("importance", *options, "--only-report")
    assert "importance" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "img" / "results" / "importance-cifar10.svg").exists()


def test_an_unknown_task_is_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        fedel_experiment("table1", "--scale", "ci", "--tasks", "cifar", "--out", tmp_path)


@pytest.mark.slow
def test_everything_at_the_scale_ci(tmp_path, capfd):
    assert 0 == fedel_experiment("all", "--scale", SCALES / "ci.toml", "--out", tmp_path, "--json")
    found = json.loads(capfd.readouterr().out)
    assert {"done"} == {run["state"] for run in found["runs"]}
    assert all(section["tables"] for section in found["sections"])
    assert not any(section["missing"] for section in found["sections"])
