"""The user's own code: found where it should be, and mistakes explained."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedel import plugins
from fedel.data import load_data
from fedel.errors import ConfigError, FedelError
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
        ({"name": "own_plugin:Half"}, "not a strategy: fold, budget_scope, widths, exits_to_average missing"),
        ({"name": "own_plugin:Min"}, "has no 'Min'; did you mean 'Mine'"),
        ({"name": "fedprox", "base": {"name": "own_plugin:Half"}}, r"\[strategy\].base: 'own_plugin:Half'"),
    ],
)
@pytest.mark.usefixtures("own")
def test_mistakes_in_a_method(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(table)


@pytest.mark.usefixtures("entry_points")
def test_entry_points() -> None:
    import torch

    assert build({"name": "registered"}).name == "mine"
    assert len(load_data("zeros").train) == 6
    assert build_model("flat", sample_input=torch.zeros(2, 4)).num_classes == 2
    with pytest.raises(ConfigError, match="did you mean 'registered'"):
        build({"name": "registred"})
