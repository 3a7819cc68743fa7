"""The names of objects: the same for the same object in any process, another for another object."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from fedel.api.objects import Objects
from fedel.data import from_arrays
from fedel.strategies import FedAvg
from tests.api.support import net
from tests.simulation import tiny

SCRIPT = """
import numpy as np
from fedel.api.objects import Objects
WIDTH = {width}
def helper(kind="relu"):
    return int if kind in {{"relu", "plain", "a", "b", "c"}} else float
class Net(list):
    def __init__(self):
        super().__init__([4, WIDTH, helper()])
def make():
    return [Net() for _ in range(1)][0]   {comment}
names = Objects()
print(names.name(make), names.data((np.arange(6.0), np.arange(6), np.zeros(2), np.ones(2))))
"""


def printed(seed: str, width: int = 3, comment: str = "") -> str:
    code = SCRIPT.format(width=width, comment=comment)
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_a_script_names_its_objects_the_same_each_time() -> None:
    first = printed("1")
    assert first.startswith("object:make-")
    assert first == printed("2", comment="# a remark changes nothing")
    assert first != printed("1", width=4)


def test_what_a_module_has_is_named_by_its_path() -> None:
    names = Objects()
    assert "tests.simulation.tiny:model" == names.model(tiny.model)
    assert "tests.simulation.tiny:data" == names.data(tiny.data)
    assert ("vgg16", "digits") == (names.model("vgg16"), names.data("digits"))
    assert {"name": "fedavg", "weighting": "samples"} == names.strategy(FedAvg(weighting="samples"))
    assert {} == names.by_name


def numbered(number: int) -> Callable[[], int]:
    return lambda: number


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (numbered(1), numbered(1), numbered(2)),
        (partial(tiny.data, 10), partial(tiny.data, 10), partial(tiny.data, 11)),
        (partial(tiny.data, num_train=9), partial(tiny.data, num_train=9), partial(tiny.data, num_test=9)),
        (lambda: 1, lambda: 1, lambda: 1.5),
        (net(4), net(4), net(5)),
    ],
)
def test_another_function_has_another_name(
    one: Callable[[], Any], same: Callable[[], Any], other: Callable[[], Any]
) -> None:
    names = Objects()
    assert names.name(one) == names.name(same)
    assert names.name(one) != names.name(other)


def test_other_data_has_another_name() -> None:
    names, (x, y, x_test, y_test) = Objects(), tiny.data()
    first = names.data((x, y, x_test, y_test))
    assert first == names.data([x.copy(), y, x_test, y_test])
    changed = x_test.copy()
    changed[0, 0, 0, 0] += 1
    made = from_arrays("mine", x, y, x_test, y_test)
    others = [names.data((x, y, changed, y_test)), names.data((x, y[::-1], x_test, y_test)), names.data(made)]
    assert 4 == len({first, *others})
    assert others[2].startswith("object:mine-")
