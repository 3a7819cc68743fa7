"""Oort's choice of clients, by hand and by counting draws."""

import math

import numpy as np
import pytest

from fedel.core import oort

NAMES = ("a", "b", "c", "d")


def scores(utilities, **changes):
    given = {
        "last_rounds": dict.fromkeys(utilities, 1),
        "durations": dict.fromkeys(utilities, 1.0),
        "current_round": 1,
        "preferred": math.inf,
        "exponent": 2.0,
        "clip": 0.95,
    }
    return oort.scores(utilities, **{**given, **changes})


def test_utility_counts_each_sample_once():
    assert 6.0 == oort.utility(9.0, num_samples=2, trained_samples=50)
    assert 0.0 == oort.utility(0.0, num_samples=2, trained_samples=50)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (25, 2.0), (99, 4.0), (100, math.inf)])
def test_preferred_seconds(percent, expected):
    assert expected == oort.preferred_seconds([4.0, 2.0, 3.0, 1.0], percent)


def test_without_durations_nobody_is_slow():
    assert math.inf == oort.preferred_seconds([], 10)


def test_penalty():
    assert 1.0 == oort.penalty(10.0, 10.0, 2.0)
    assert pytest.approx(1 / 9) == oort.penalty(30.0, 10.0, 2.0)
    assert 1.0 == oort.penalty(30.0, 10.0, 0.0)


def test_score_is_scaled_utility():
    found = scores({"a": 1.0, "b": 3.0, "c": 2.0}, clip=1.0)
    assert found == pytest.approx({"a": 0.001 / 2.001, "b": 1.0, "c": 1.001 / 2.001})


def test_an_outlier_counts_as_the_clipped_one():
    found = scores({"a": 1.0, "b": 2.0, "c": 3.0, "d": 1000.0}, clip=0.5)
    assert found["d"] == found["c"] > found["b"] > found["a"]


def test_who_was_not_chosen_for_long_gains():
    found = scores({"a": 1.0, "b": 1.0}, last_rounds={"a": 1, "b": 9}, current_round=10)
    stale = [math.sqrt(0.1 * math.log(10) / last) for last in (1, 9)]
    assert pytest.approx(stale[0] - stale[1]) == found["a"] - found["b"]


def test_who_is_slow_loses():
    found = scores({"a": 2.0, "b": 2.0}, durations={"a": 10.0, "b": 40.0}, preferred=20.0)
    assert pytest.approx(found["a"] / 4) == found["b"]


def test_nobody_known():
    assert {} == scores({})


def test_exploit_leaves_out_who_is_much_worse():
    scored = {"a": 1.0, "b": 0.9, "c": 0.89, "d": 0.1}
    rng = np.random.default_rng(0)
    drawn = {name for _ in range(200) for name in oort.exploit(scored, 2, 0.95, rng)}
    assert {"a", "b", "c"} == drawn


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_exploit_draws_each_at_most_once(count):
    drawn = oort.exploit(dict.fromkeys(NAMES, 1.0), count, 0.95, np.random.default_rng(1))
    assert min(count, 4) == len(drawn) == len(set(drawn))


def test_explore_draws_from_the_most_promising():
    rewards = {f"c{i}": float(i) for i in range(20)}
    rng = np.random.default_rng(2)
    drawn = [name for _ in range(2000) for name in oort.explore(rewards, 1, rng)]
    assert {f"c{i}" for i in range(20 - oort.POOL, 20)} == set(drawn)
    assert drawn.count("c19") > drawn.count("c15")


def test_rewards_of_zero_can_be_drawn():
    assert set(NAMES) == set(oort.explore(dict.fromkeys(NAMES, 0.0), 4, np.random.default_rng(3)))


@pytest.mark.parametrize(
    ("history", "round_num", "expected"),
    [
        ([10, 10, 10, 10], 4, 35.0),
        ([10, 10, 100, 100], 4, 25.0),
        ([10, 10, 20, 20], 4, 30.0),
        ([10, 10, 10, 10], 3, 30.0),
        ([10, 10], 2, 30.0),
    ],
)
def test_pace(history, round_num, expected):
    assert expected == oort.pace(30.0, history, round_num, every=2, delta=5.0)


def test_pace_stays_within_its_bounds():
    assert 100 == oort.pace(98.0, [1, 1, 1, 1], 4, every=2, delta=5.0)
    assert 5.0 == oort.pace(6.0, [1, 1, 50, 50], 4, every=2, delta=5.0)
