import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from fedel import config
from fedel.cli import simulate
from fedel.errors import ConfigError
from fedel.simulation.job import SimulationConfig
from fedel.training.factory import initial_model
from fedel.training.profile_io import save_profile
from tests.simulation import tiny
from tests.strategies.fakes import same_bits

TABLE = {
    "workload": {"model": "tests.simulation.tiny:model", "data": "tests.simulation.tiny:data"},
    "rounds": {"num_rounds": 2, "num_participants": 3},
    "work": {"num_steps": 3, "batch_size": 8},
    "partition": {"num_clients": 4, "method": "iid"},
}


@pytest.fixture
def job_file(tmp_path):
    table = {**TABLE, "fleet": {"base": str(tmp_path / "base.json")}}
    save_profile(tiny.profile(initial_model(SimulationConfig.parse(table).run)[0]), tmp_path / "base.json")
    (tmp_path / "small.toml").write_text(config.write(table))
    return tmp_path / "small.toml"


def fedel_simulate(*words):
    parser = argparse.ArgumentParser()
    simulate.add_parser(parser.add_subparsers(dest="verb"))
    arguments = parser.parse_args(["simulate", *map(str, words)])
    return arguments.run(arguments)


def test_a_job_becomes_a_directory_with_a_report(job_file, tmp_path, capfd):
    assert 0 == fedel_simulate(job_file, "--out", tmp_path / "runs", "--executor", "serial")
    place = tmp_path / "runs" / "small-fedel-0"
    said = capfd.readouterr()
    assert f"report: {place / 'report.html'}" in said.out
    assert "round   2/2" in said.err
    assert "left" in said.err
    assert "<svg" in (place / "report.html").read_text()
    result = json.loads((place / "result.json").read_text())
    assert (2, "fedel") == (result["rounds"], result["strategy"])


def test_a_run_that_diverges_says_why_in_its_first_round(job_file, tmp_path, capfd):
    """Once per reason, also in the summary; and it has a report."""
    words = ("--set", "work.lr=1e30", "--set", "rounds.num_participants=9", "--executor", "serial")
    assert 0 == fedel_simulate(job_file, "--out", tmp_path, *words)
    said = capfd.readouterr()
    lines = said.err.splitlines()
    assert "rounds.num_participants = 9, but the fleet has 4 clients" in lines[0]
    assert "(4 did not count)" in lines[1]
    assert lines[2].startswith("  ")
    assert "training diverged, try a lower learning rate" in lines[2]
    assert "left" in lines[1]
    assert "left" not in next(line for line in lines if line.startswith("round   2/2"))
    assert "no update counted in any round" in said.out
    assert "diverged" in (tmp_path / "small-fedel-0" / "report.html").read_text()


def test_one_round_is_one_round(job_file, tmp_path, capfd):
    assert 0 == fedel_simulate(
        job_file, "--out", tmp_path, "--executor", "serial", "--set", "rounds.num_rounds=1"
    )
    said = capfd.readouterr()
    assert "after 1 round. The fleet would have taken" in said.out
    assert "left" not in said.err


def test_the_result_is_printed_for_scripts_and_settings_are_overridden(job_file, tmp_path, capfd):
    words = ("--set", "strategy.name=fedavg", "--set", "seed=5", "--json", "--executor", "serial")
    assert 0 == fedel_simulate(job_file, "--out", tmp_path, *words)
    result = json.loads(capfd.readouterr().out)
    assert ("small-fedavg-5", 5) == (result["run"], result["seed"])


def test_a_negative_number_of_workers_is_refused(job_file, tmp_path):
    with pytest.raises(ConfigError, match="at least one worker"):
        fedel_simulate(job_file, "--out", tmp_path, "--workers", "-1")


def test_a_second_run_of_the_same_name_is_refused(job_file, tmp_path):
    fedel_simulate(job_file, "--out", tmp_path, "--executor", "serial", "--json")
    with pytest.raises(ConfigError, match="--resume"):
        fedel_simulate(job_file, "--out", tmp_path, "--executor", "serial", "--json")


def test_ctrl_c_stops_the_workers_and_the_run_goes_on_later(job_file, tmp_path, request):
    command = [
        sys.executable,
        "-m",
        "tests.simulation.test_cli_simulate",
        str(job_file),
        "--out",
        str(tmp_path),
    ]
    command += ["--workers", "2", "--set", "rounds.num_rounds=100000"]
    environment = {**os.environ, "PYTHONPATH": str(request.config.rootpath)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "round   3/" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read()
    assert 130 == process.returncode
    assert "--resume" in rest
    assert "Traceback" not in rest
    reached = len((tmp_path / "small-fedel-0" / "rounds.jsonl").read_text().splitlines())
    assert 3 <= reached
    words = ("--executor", "serial", "--resume", "--set", f"rounds.num_rounds={reached + 1}", "--json")
    assert 0 == fedel_simulate(job_file, "--out", tmp_path, *words)


if __name__ == "__main__":
    sys.exit(fedel_simulate(*sys.argv[1:]))


def test_a_run_starts_from_a_model_of_another(job_file, tmp_path, capfd):
    """It says so in its result, also if it is resumed when the file is gone; ``@best`` is not ``@last``."""
    words = ("--out", tmp_path, "--executor", "serial")
    assert 0 == fedel_simulate(job_file, *words, "--name", "one", "--set", "rounds.keep_every=1")
    kept = tmp_path / "one" / "model-1.safetensors"
    digest = hashlib.sha256(kept.read_bytes()).hexdigest()
    more = (*words, "--from", "one@1", "--name", "two")
    assert 0 == fedel_simulate(job_file, *more, "--set", "rounds.num_rounds=1", "--set", "work.lr=1e-30")
    origin = json.loads((tmp_path / "two" / "result.json").read_text())["origin"]
    assert {"file": str(kept), "sha256": digest} == origin
    first, start = load_file(tmp_path / "two" / "model.safetensors"), load_file(kept)
    weights = [name for name in start if name.endswith("weight")]
    assert same_bits({n: start[n] for n in weights}, {n: first[n] for n in weights})
    kept.rename(tmp_path / "elsewhere")
    setting = f"workload.initial={kept}"
    assert 0 == fedel_simulate(
        job_file, *words, "--name", "two", "--resume", "--set", setting, "--set", "work.lr=1e-30"
    )
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (2, origin) == (result["rounds"], result["origin"])
    with pytest.raises(ConfigError, match=r"cannot go on with workload\.initial = ''"):
        fedel_simulate(job_file, *words, "--name", "two", "--resume", "--set", "work.lr=1e-30")


def test_a_finished_run_gets_more_rounds(job_file, tmp_path, capfd):
    words = ("--out", tmp_path, "--executor", "serial")
    assert 0 == fedel_simulate(job_file, *words, "--name", "one")
    assert 0 == fedel_simulate(job_file, *words, "--name", "one", "--resume", "--set", "rounds.num_rounds=4")
    assert 0 == fedel_simulate(job_file, *words, "--name", "whole", "--set", "rounds.num_rounds=4")
    assert same_bits(*(load_file(tmp_path / name / "model.safetensors") for name in ("one", "whole")))
