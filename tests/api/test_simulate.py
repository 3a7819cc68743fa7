"""``fedel.simulate`` and ``fedel.load``: every form of a job and of what it names gives the same run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import fedel
from fedel import config
from fedel.data import from_arrays
from fedel.errors import ConfigError, DataError, ModelError
from fedel.records import RoundRecord
from fedel.simulation.job import SimulationConfig
from fedel.simulation.store import alone
from fedel.strategies import FedAvg, FedEL, FedProx
from tests.api.support import ROUNDS, WORKLOAD, job_in, net
from tests.simulation import tiny

QUIET: dict[str, Any] = {"executor": "serial", "progress": False}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return job_in(tmp_path)


def bits(result: fedel.Result) -> bytes:
    return (result.path / "model.safetensors").read_bytes()


def test_import_is_light_and_help_is_a_page() -> None:
    code = (
        "import sys, fedel; assert not {'torch', 'grpc', 'numpy'} & {*sys.modules};"
        "assert {'simulate', 'run', 'compare', 'load'} <= {*dir(fedel)};"
        "assert 'fedel.simulate(' in fedel.__doc__; assert fedel.strategies.FedEL;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fedel.simulat  # noqa: B018


def test_every_form_of_a_job_gives_the_same_run(job: dict[str, Any], tmp_path: Path) -> None:
    whole = {**job, "workload": WORKLOAD}
    (tmp_path / "small.toml").write_text(config.write(whole))
    typed = SimulationConfig.parse(whole)
    made = {
        "file": fedel.simulate("small.toml", **QUIET),
        "path": fedel.simulate(tmp_path / "small.toml", name="path", **QUIET),
        "dict": fedel.simulate(whole, **QUIET),
        "typed": fedel.simulate(typed, name="typed", **QUIET),
        "objects": fedel.simulate(job, model=net(), data=tiny.data(), name="objects", **QUIET),
        "functions": fedel.simulate(job, model=tiny.model, data=tiny.data, name="functions", **QUIET),
    }
    assert (Path("runs/small-fedel-1"), Path("runs/job-fedel-1")) == (made["file"].path, made["dict"].path)
    assert 1 == len({bits(result) for result in made.values()})
    assert WORKLOAD["model"] == made["functions"].stored.settings["workload"]["model"]
    assert whole == {**job, "workload": WORKLOAD}


def test_objects_reach_forked_workers(job: dict[str, Any]) -> None:
    """Also from a process that has trained something with torch itself, as a notebook may."""
    torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()

    @dataclass(frozen=True)
    class Mine(FedAvg):
        name = "mine"
        strength: float = 0.5

    x_train, y_train, x_test, y_test = tiny.data()
    data = from_arrays("stripes", x_train, y_train, x_test, y_test)
    found = {
        executor: fedel.simulate(
            job,
            model=lambda: net()(),
            data=data,
            strategy=Mine(strength=0.25),
            executor=executor,
            workers=2,
            name=executor,
            progress=False,
        )
        for executor in ("processes", "serial")
    }
    assert bits(found["processes"]) == bits(found["serial"])
    settings = found["processes"].stored.settings
    assert settings["strategy"]["name"].startswith("object:Mine-")
    assert 0.25 == settings["strategy"]["strength"]
    assert settings["workload"]["data"].startswith("object:stripes-")
    assert "mine" == found["serial"].result.strategy


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("fedavg", "fedavg"), (FedAvg, "fedavg"), (FedProx(FedEL(beta=0.3)), "fedprox-fedel")],
)
def test_a_method_is_a_name_a_class_or_an_object(job: dict[str, Any], strategy: Any, name: str) -> None:
    once = {"rounds.num_rounds": 1, "work.lr": 0.1}
    result = fedel.simulate({**job, "workload": WORKLOAD}, strategy=strategy, overrides=once, **QUIET)
    assert Path(f"runs/job-{name}-1") == result.path
    settings = result.stored.settings
    assert (1, 0.1) == (settings["rounds"]["num_rounds"], settings["work"]["lr"])
    assert settings["strategy"].get("base", {}).get("beta") == (0.3 if "fedel" in name else None)


def test_ctrl_c_leaves_a_run_that_goes_on_to_the_same_bits(job: dict[str, Any]) -> None:
    seen: list[RoundRecord] = []

    def impatient(record: RoundRecord) -> None:
        seen.append(record)
        if len(seen) == 2:
            raise KeyboardInterrupt

    objects = {"model": net(), "data": tiny.data()}
    whole = fedel.simulate(job, name="whole", **objects, **QUIET)
    with pytest.raises(KeyboardInterrupt, match=rf"2 rounds of {ROUNDS} are in runs/cut.*resume=True"):
        fedel.simulate(job, name="cut", **objects, executor="processes", workers=2, progress=impatient)
    left = fedel.load("runs/cut")
    assert "2 rounds" in repr(left)
    assert "unfinished" in repr(left)
    for unfinished in (lambda: left.model(), lambda: left.result):
        with pytest.raises(ConfigError, match="resume=True"):
            unfinished()
    with pytest.raises(ConfigError, match="resume=True"):
        fedel.simulate(job, name="cut", **objects, **QUIET)
    with pytest.raises(ConfigError, match=r"workload\.model = 'object:make_net-\w+', the run was started with"):
        fedel.simulate(job, name="cut", model=net(8), data=objects["data"], resume=True, **QUIET)
    with pytest.raises(ConfigError, match=r"workload\.data = 'object:arrays-\w+', the run was started with"):
        fedel.simulate(job, name="cut", model=net(), data=tiny.data(200), resume=True, **QUIET)
    again = fedel.simulate(job, name="cut", model=net(), data=tiny.data(), resume=True, **QUIET)
    assert bits(whole) == bits(again)
    assert [0, 1] == [record.round for record in seen]
    assert again == fedel.simulate(job, name="cut", model=net(), data=tiny.data(), resume=True, **QUIET)


def test_a_result_has_rounds_a_frame_a_model_and_a_report(job: dict[str, Any], tmp_path: Path) -> None:
    arrays = tiny.data()
    result = fedel.simulate(job, model=net(), data=arrays, **QUIET)
    assert [0, 1, 2] == [record.round for record in result.rounds]
    assert 3 == len(result.rounds[0].clients)
    frame = result.frame()
    assert [1, 2, 3] == list(frame["round"])
    assert result.accuracy == frame["accuracy"].iloc[-1] == result.result.accuracy
    loaded = fedel.load(result.path, model=net(), data=arrays)
    for each in (result, loaded):
        model = each.model()
        assert not model.training
        assert not any(weight.requires_grad for weight in model.parameters())
        guessed = model(torch.from_numpy(arrays[2])).argmax(1).numpy()
        assert result.accuracy == pytest.approx(np.mean(guessed == arrays[3]))
    assert "<svg" in result.report().read_text()
    assert tmp_path / "page" / "report.html" == result.report(tmp_path / "page")
    assert 1 == len(repr(result).splitlines())
    assert "accuracy" in repr(result)
    assert "runs/job-fedel-1" in result._repr_html_()
    with pytest.raises(ModelError, match=r"'object:make_net-\w+' was given as a Python object.*give it again"):
        fedel.load(result.path, data=arrays).model()
    with pytest.raises(ConfigError, match=r"model is 'object:make_net.*give the same object"):
        fedel.load(result.path, model=net(5))


def test_a_frame_without_pandas_says_what_to_install(
    job: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = {**job, "workload": WORKLOAD, "rounds": {"num_rounds": 1}}
    result = fedel.simulate(job, **QUIET)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match="pip install pandas"):
        result.frame()


def test_a_run_that_failed_on_its_model_does_not_block_its_name(job: dict[str, Any]) -> None:
    @dataclass(frozen=True)
    class Broken(FedAvg):
        name = "broken"

        def fit(self, *_: Any) -> Any:
            raise ModelError("this model cannot be narrowed")

    with pytest.raises(ModelError, match="narrowed"):
        fedel.simulate(job, model=net(6), data=tiny.data, strategy=Broken(), name="one", **QUIET)
    assert "unfinished" in repr(fedel.load("runs/one"))
    done = fedel.simulate(job, model=net(), data=tiny.data, name="one", **QUIET)
    assert ROUNDS == len(done.rounds)


def test_two_processes_do_not_work_on_one_run(job: dict[str, Any]) -> None:
    with alone(Path("runs/one")), pytest.raises(ConfigError, match="another process works on runs/one"):
        fedel.simulate({**job, "workload": WORKLOAD}, name="one", **QUIET)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"model": net()()}, ModelError, "give the function or class that makes it"),
        ({"model": 3}, ModelError, "a function that returns a torch.nn.Module"),
        ({"data": 3}, DataError, "x_train, y_train, x_test, y_test"),
        ({"data": (1, 2)}, DataError, "map-style"),
        ({"strategy": 3}, ConfigError, "give the name of a method"),
        ({"strategy": "fedell"}, ConfigError, "did you mean 'fedel'"),
        ({"overrides": {"work.lrr": 1}}, ConfigError, "did you mean 'lr'"),
        ({"overrides": {"seed.x": 1}}, ConfigError, "'seed' is a value, not a section"),
        ({"workers": -1, "executor": "processes"}, ConfigError, "at least one worker"),
    ],
)
def test_what_cannot_be_used_is_refused(
    job: dict[str, Any], given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        fedel.simulate({**job, "workload": WORKLOAD}, **{**QUIET, **given})


def test_a_job_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"job: a list; give the path of a TOML file"):
        fedel.simulate([1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"strategy = 'fedavg': expected a table"):
        fedel.simulate({"strategy": "fedavg"}, strategy="fedel")
    with pytest.raises(ConfigError, match="no such run directory"):
        fedel.load("runs/nothing")


@pytest.mark.parametrize("terminal", [True, False])
def test_rounds_are_shown_where_the_caller_wants_them(
    job: dict[str, Any], terminal: bool, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole = {**job, "workload": WORKLOAD}
    with (tmp_path / "shown").open("w+") as file:
        console = Console(file=file, force_terminal=terminal, width=200)
        fedel.simulate(whole, name="console", executor="serial", progress=console)
        file.seek(0)
        assert "round   3/3" in file.read()
    assert ("", "") == capfd.readouterr()
    fedel.simulate(whole, name="quiet", **QUIET)
    assert ("", "") == capfd.readouterr()
    fedel.simulate(whole, name="shown", executor="serial")
    out, err = capfd.readouterr()
    assert ("", 3) == (out, err.count("virtual"))


def test_the_typed_job_of_a_run_is_enough(job: dict[str, Any]) -> None:
    """A RunConfig has no fleet: the defaults of a simulation stand in."""
    typed = SimulationConfig.parse({**job, "workload": WORKLOAD})
    run = replace(typed.run, rounds=replace(typed.run.rounds, num_rounds=1, num_participants=2))
    overrides = {"fleet.base": job["fleet"]["base"], "partition.num_clients": 3, "partition.method": "iid"}
    assert 1 == len(fedel.simulate(run, overrides=overrides, **QUIET).rounds)
