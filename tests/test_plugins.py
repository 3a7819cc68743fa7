"""The user's own code: found where it should be, and mistakes explained."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedel import plugins
from fedel.data import load_data
from fedel.data.text import user_text
from fedel.errors import ConfigError, FedelError, ModelError
from fedel.models import build as build_model
from fedel.strategies import build, describe

OWN = """
from dataclasses import dataclass
import numpy as np
from fedel.strategies import FedAvg

number = 5

def function():
    return "own"

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
    strength: float = 0.5

class Plain:
    pass

@dataclass(frozen=True)
class Half:
    name: str = "half"
    weighting: str = "uniform"

    def plan(self, context): ...
    def fit(self, task, model, memory, trainer): ...

def data():
    x = np.zeros((6, 4), np.float32)
    return x, np.arange(6) % 2, x, np.arange(6) % 2

def model():
    from torch import nn
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_plugin.py").write_text(OWN)
    (tmp_path / "broken_plugin.py").write_text("1 / 0")
    (tmp_path / "needy_plugin.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    monkeypatch.delitem(sys.modules, "own_plugin", raising=False)
    return tmp_path


@pytest.fixture
def entry_points(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "fedel.strategies": EntryPoint("registered", "own_plugin:Mine", "fedel.strategies"),
        "fedel.models": EntryPoint("flat", "own_plugin:model", "fedel.models"),
        "fedel.data": EntryPoint("zeros", "own_plugin:data", "fedel.data"),
    }
    monkeypatch.setattr(plugins, "entry_points", lambda group: [made[group]])


def test_the_working_directory_comes_last(own: Path) -> None:
    for name in ("json", "numpy", "fedel_plugin_test"):
        (own / f"{name}.py").write_text("def loads(): return 'shadow'")
    assert plugins.load("fedel_plugin_test:loads", "thing", ConfigError)() == "shadow"
    assert sys.path[-1] == str(own)
    assert plugins.load("json:loads", "thing", ConfigError)("1") == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("own_plugin", "thing 'own_plugin': write it as package.module:attribute"),
        (":function", "write it as package.module:attribute"),
        ("own_plugin:", "write it as package.module:attribute"),
        (
            "absent_plugin:function",
            "there is no module 'absent_plugin', neither in {here} nor .*PYTHONPATH",
        ),
        ("absent.plugin:function", "there is no module 'absent.plugin', neither in"),
        ("needy_plugin:function", "module 'needy_plugin' needs 'no_such_library', which is not installed"),
        ("broken_plugin:function", "importing 'broken_plugin' failed: ZeroDivisionError"),
        ("own_plugin:funktion", r"\({here}/own_plugin.py\) has no 'funktion'; did you mean 'function'"),
        ("own_plugin:number", "'number' is a int; name a function or a class"),
    ],
)
def test_mistakes(own: Path, path: str, words: str) -> None:
    with pytest.raises(FedelError, match=words.format(here=own)) as raised:
        plugins.load(path, "thing", ConfigError)
    assert raised.type is ConfigError


def test_own_method(own: Path) -> None:
    strategy = build({"name": "own_plugin:Mine", "strength": 1, "weighting": "uniform"})
    assert (strategy.name, strategy.strength, strategy.weighting) == ("mine", 1.0, "uniform")
    assert describe(strategy)["name"] == "own_plugin:Mine"
    wrapped = build({"name": "fedprox", "mu": 0.1, "base": {"name": "own_plugin:Mine"}})
    assert wrapped.base.strength == 0.5
    assert build(describe(wrapped)) == wrapped


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"name": "own_plugin:Mine", "strenght": 1},
            "unknown key 'strenght'; did you mean 'strength'",
        ),
        ({"name": "own_plugin:function"}, "'own_plugin:function' is not a dataclass"),
        ({"name": "own_plugin:Plain"}, "'own_plugin:Plain' is not a dataclass"),
        (
            {"name": "own_plugin:Half"},
            "not a strategy: fold, budget_scope, fits_steps, sends_parts, fits_memory, widths, exits_to",
        ),
        ({"name": "own_plugin:Min"}, "has no 'Min'; did you mean 'Mine'"),
        ({"name": "fedprox", "base": {"name": "own_plugin:Half"}}, r"\[strategy\].base: 'own_plugin:Half'"),
    ],
)
@pytest.mark.usefixtures("own")
def test_mistakes_in_a_method(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(table)


@pytest.mark.parametrize(
    "path",
    [
        "subprocess:run",
        "os:system",
        "builtins:eval",
        "importlib:import_module",
        "numpy:load",
        "torch:load",
        "__main__:main",
        "fedel.files:write_atomic",
        "fedel.data.fetch:fetch",
        "fedel.cli.main:main",
        "fedel.plugins:load",
        "fedel.training.factory:os.system",
        "fedel.training.factory:initial_model",
        "fedel.strategies.base:replace",
        "own_plugin:dataclass",
        "own_plugin:np",
        "own_plugin:np.load",
        "reexporting_plugin:run",
        "reexporting_plugin:partly",
        "reexporting_plugin:subprocess.run",
        "site-packages.hidden:function",
        "site_packages/hidden:function",
        "json:loads",
        "..own_plugin:function",
    ],
)
def test_refused_code(own: Path, path: str) -> None:
    (own / "reexporting_plugin.py").write_text(
        "import functools, subprocess\nfrom subprocess import run\npartly = functools.partial(run)\n"
    )
    (own / "json.py").write_text("def loads(): raise SystemExit")
    (own / "site-packages").mkdir()
    (own / "site-packages" / "hidden.py").write_text("def function(): ...")
    allowed = plugins.Allowed(("own_plugin", "reexporting_plugin"), (str(own),))
    with plugins.only(allowed), pytest.raises(ConfigError):
        plugins.load(path, "thing", ConfigError)


def test_nothing_is_imported_before_it_is_allowed(own: Path) -> None:
    with plugins.only(plugins.Allowed()), pytest.raises(ConfigError, match=r"`allow` in the section \[code\]"):
        plugins.load("broken_plugin:function", "thing", ConfigError)
    with plugins.only(plugins.Allowed(("own_plugin:Mine",))), pytest.raises(ConfigError, match="own_plugin"):
        plugins.load("own_plugin:function", "thing", ConfigError)


@pytest.mark.parametrize("names", [("own_plugin",), ("own_plugin.",), ("own_plugin:function",), ()])
def test_allowed_code(own: Path, names: tuple[str, ...]) -> None:
    with plugins.only(plugins.Allowed(names, () if names else (".",))):
        assert plugins.load("own_plugin:function", "thing", ConfigError)() == "own"
        assert plugins.load("fedel.training.factory:make_trainer", "thing", ConfigError)
        assert build({"name": "fedel.strategies:FedAvg"}).name == "fedavg"


@pytest.mark.parametrize(
    "name_it",
    [
        build_model,
        load_data,
        lambda name: plugins.load(name, "trainer", ConfigError),
        lambda name: build({"name": name}),
        lambda name: build({"name": "fedprox", "base": {"name": name}}),
    ],
    ids=["model", "data", "trainer", "strategy", "base"],
)
@pytest.mark.usefixtures("own")
def test_each_place_of_a_job_is_checked(name_it: Callable[[str], object]) -> None:
    with plugins.only(plugins.Allowed()), pytest.raises(FedelError, match="does not allow jobs to run code of"):
        name_it("own_plugin:function")


@pytest.mark.usefixtures("entry_points")
def test_entry_points_are_checked() -> None:
    with plugins.only(plugins.Allowed()), pytest.raises(FedelError, match="code of 'own_plugin'"):
        load_data("zeros")
    with plugins.only(plugins.Allowed(("own_plugin",))):
        assert len(load_data("zeros").train) == 6


@pytest.mark.parametrize("path", ["/etc/passwd", "../secret", "models/../../secret", "~/secret"])
def test_a_job_names_no_files_of_the_device(tmp_path: Path, path: str) -> None:
    (tmp_path / "ada.txt").write_text("one two three four five " * 20)
    jobs = [
        lambda: build_model("albert", weights=path),
        lambda: user_text(tmp_path, tokenizer=path),
    ]
    for job in jobs:
        with plugins.only(plugins.Allowed()), pytest.raises(FedelError, match="`files` in the section"):
            job()


def test_files_that_jobs_may_name(tmp_path: Path) -> None:
    def named(path: object) -> Path:
        return plugins.path_of(str(path), "weights", ModelError)

    assert Path("/anywhere") == named("/anywhere"), "people run their own jobs"
    with plugins.only(plugins.Allowed(files=(str(tmp_path / "albert"),))):
        assert Path("weights/albert") == named("weights/albert")
        assert tmp_path / "albert/spiece.model" == named(tmp_path / "albert/spiece.model")
        with pytest.raises(ModelError, match=r"weights '.*albert2': jobs may name files below"):
            named(tmp_path / "albert2")


@pytest.mark.parametrize("name", ["subprocess", "os.path", "builtins:eval", "", "a b", "a:", "a:b.c", "../a"])
def test_what_cannot_be_allowed(name: str) -> None:
    with pytest.raises(ValueError, match="allow = "):
        plugins.Allowed((name,))


@pytest.mark.usefixtures("entry_points")
def test_entry_points() -> None:
    import torch

    assert build({"name": "registered"}).name == "mine"
    assert len(load_data("zeros").train) == 6
    assert build_model("flat", sample_input=torch.zeros(2, 4)).num_classes == 2
    with pytest.raises(ConfigError, match="did you mean 'registered'"):
        build({"name": "registred"})


def test_an_object_is_found_while_it_is_given() -> None:
    name = f"{plugins.GIVEN}net-1"

    def found() -> object:
        return plugins.find(name, "fedel.models", "model", ModelError)

    with plugins.given({name: dict}):
        assert found() is dict
        with plugins.given({f"{plugins.GIVEN}other": list}):
            assert found() is dict
    with pytest.raises(ModelError, match=r"model 'object:net-1' was given as a Python object.*give it again"):
        found()


def test_a_device_knows_no_object_of_another_process() -> None:
    with plugins.only(plugins.Allowed()), pytest.raises(ModelError, match="give it again"):
        plugins.find(f"{plugins.GIVEN}net-1", "fedel.models", "model", ModelError)
