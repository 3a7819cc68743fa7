import math

import numpy as np
import pytest

from fedel.core.importance import blend, global_change, local


def test_local_importance_turns_the_sign_and_divides_by_the_largest():
    assert {"a": 1.0, "b": -0.5, "c": 0.25} == local({"a": -8.0, "b": 4.0, "c": -2.0})


@pytest.mark.parametrize("useless", [0.0, math.nan, math.inf])
def test_a_probe_that_says_nothing_makes_all_equal(useless):
    assert {"a": 1.0, "b": 1.0} == local({"a": useless, "b": 0.0})


def test_global_importance_is_the_squared_change():
    old = {"w": np.zeros(2, np.float32), "v": np.ones(3, np.float32)}
    new = {"w": np.array([0.1, -0.2], np.float32), "v": np.ones(3, np.float32)}
    change = global_change(new, old)
    assert 0.5 == pytest.approx(change["w"] / 0.1, rel=1e-6)
    assert 0.0 == change["v"]


def test_both_views_are_normalised_within_the_window():
    mine = {"a": 1.0, "b": -1.0}
    outside = {"a": 1.0, "b": 4.0, "elsewhere": 1e9}
    assert {"a": 0.6 + 0.4 * 0.25, "b": pytest.approx(-0.6 + 0.4)} == blend(mine, outside, 0.6)


def test_the_learning_rate_cancels():
    mine, change = {"a": 0.3, "b": 1.0}, {"a": 1.0, "b": 4.0}
    scaled = {name: value / 0.01 for name, value in change.items()}
    assert blend(mine, change, 0.6) == pytest.approx(blend(mine, scaled, 0.6))


@pytest.mark.parametrize("nothing", [{}, {"a": 0.0, "b": 0.0}, {"elsewhere": 3.0}])
def test_without_a_global_view_the_local_one_stands_alone(nothing):
    assert {"a": 1.0, "b": -0.5} == blend({"a": 1.0, "b": -0.5}, nothing, 0.6)
