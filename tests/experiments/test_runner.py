import fcntl
from dataclasses import replace

import pytest

from fedel.errors import ConfigError
from fedel.experiments import runner, scale
from fedel.experiments.plans import plan
from fedel.records import RunResult
from tests.experiments import fake_runs


class Recorder:
    """Remembers what it was given; can press Ctrl-C after a number of rounds."""

    def __init__(self, rounds=1000):
        self.rounds, self.begun, self.said, self.left = rounds, [], [], []

    def run_begins(self, run, place, total):
        self.begun.append(run.name)

    def round_done(self, run, record, seconds_left):
        self.left.append(seconds_left)
        if len(self.left) == self.rounds:
            raise KeyboardInterrupt

    def run_ended(self, run, said):
        self.said.append(said)


def ci_runs(*labels):
    return [run for run in plan("table1", scale.load("ci"), ["cifar10"], 1) if run.label in labels]


def do(runs, place, screen=None):
    screen = screen or Recorder()
    return runner.do_missing(runs, place, screen, executor="serial"), screen


def test_interrupted_runs_go_on_to_the_same_end_and_done_ones_are_reused(tmp_path):
    runs = ci_runs("heterofl", "fedel")
    do(runs, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        do(runs, tmp_path / "cut", Recorder(rounds=4))
    states = [runner.state(run, tmp_path / "cut") for run in runs]
    assert [runner.DONE, runner.BEGUN] == states
    assert 1 == runner.rounds_done(runs[1], tmp_path / "cut")
    _, screen = do(runs, tmp_path / "cut")
    assert [runs[1].name] == screen.begun
    assert 2 == len(screen.left)
    for run in runs:
        assert figures(tmp_path / "whole" / run.name) == figures(tmp_path / "cut" / run.name)
    assert [] == do(runs, tmp_path / "cut")[1].begun


def figures(folder):
    result = RunResult.from_json((folder / "result.json").read_text())
    return replace(result, wall_seconds=0.0), (folder / "model.safetensors").read_bytes()


def test_a_run_that_cannot_be_done_is_told_of_and_the_others_are_done(tmp_path):
    size = scale.load("ci")
    wrong = scale.overlaid(size.tasks["cifar10"].job, {"workload": {"data": "fedel.experiments.tiny:nothing"}})
    tasks = {"broken": scale.Task("broken", wrong), "cifar10": size.tasks["cifar10"]}
    runs = [
        r
        for r in plan("devices", fake_runs.scale(tasks=tasks, experiments=ALL), seeds=1)
        if r.label == "fedavg"
    ]
    failed, screen = do(runs, tmp_path)
    assert ["broken"] == [name.partition("-")[0] for name in failed]
    assert "no 'nothing'" in failed[runs[0].name]
    assert [runner.MISSING, runner.DONE] == [runner.state(r, tmp_path) for r in runs]
    assert "accuracy" in screen.said[1]


ALL = {"devices": scale.Setting(tasks=("broken", "cifar10"))}


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path):
    (run,) = ci_runs("fedavg")
    (tmp_path / run.name).mkdir()
    with (tmp_path / run.name / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        failed, screen = do([run], tmp_path)
    assert ({}, runner.MISSING) == (failed, runner.state(run, tmp_path))
    assert "another process" in screen.said[0]


def test_a_directory_with_other_settings_is_not_taken_for_the_run(tmp_path):
    run = plan("table1", fake_runs.scale())[0]
    fake_runs.write(run, tmp_path, [0.5])
    settings = (tmp_path / run.name / "config.toml").read_text()
    (tmp_path / run.name / "config.toml").write_text(settings.replace("num_steps = 10", "num_steps = 11"))
    with pytest.raises(ConfigError, match="num_steps"):
        runner.state(run, tmp_path)


def test_the_time_left_counts_all_runs():
    """Two rounds of task a took 20 s; b, of which nothing is known, is taken to be as slow."""
    pace = runner.Pace()
    assert 0.0 == pace.seconds("a", 5)
    pace.learn("a", 20.0, rounds=2)
    assert (30.0, 10.0) == (pace.seconds("a", 3), pace.seconds("b", 1))
    pace.learn("b", 1.0)
    assert (30.0, 1.0) == (pace.seconds("a", 3), pace.seconds("b", 1))
