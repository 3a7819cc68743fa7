"""The gate refuses what cannot be true, whatever a member sends."""

import math
from dataclasses import replace

import pytest

from fedel.roles.gate import (
    MAX_TEXT,
    clean,
    objection_to_name,
    objection_to_report,
    objection_to_wanted,
    weighed,
)
from fedel.types import ModelSpec, Participant, Report, StepCost, TensorSpec, Window

SPEC = ModelSpec("toy", ("a", "b"), (TensorSpec("a.w", 1, (2,)), TensorSpec("b.w", 2, (2,))))
TASK = Participant("c", 3, num_samples=100, max_steps=10, max_effective_steps=100.0)
GOOD = Report(
    client="c",
    round_num=3,
    num_samples=100,
    num_steps=10,
    effective_steps=55.0,
    loss=0.5,
    window=Window(1, 2),
    selected=("a.w",),
)


def test_good_report():
    assert objection_to_report(GOOD, SPEC, TASK) == ""


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("client", "evil"),
        ("round_num", 2),
        ("num_steps", -1),
        ("num_steps", 11),
        ("effective_steps", 1e300),
        ("effective_steps", math.nan),
        ("loss", math.nan),
        ("loss", math.inf),
        ("loss_square", -1.0),
        ("update_norm", math.inf),
        ("cost", StepCost(1e308, 0.0)),
        ("probe", StepCost(0.0, -1.0)),
        ("train_seconds", math.nan),
        ("peak_memory_bytes", -1),
        ("peak_memory_bytes", 2**62),
        ("resets", -1),
        ("rounds_held", 2**40),
        ("window", Window(2, 1)),
        ("window", Window(1, 3)),
        ("window", Window(-4, 1)),
        ("selected", ("x" * 4_000_000,)),
        ("selected", ("a.w", "a.w")),
    ],
)
def test_refused_report(field, value):
    objection = objection_to_report(replace(GOOD, **{field: value}), SPEC, TASK)
    assert objection
    assert len(objection) < MAX_TEXT


def test_weight_comes_from_the_join():
    assert weighed(replace(GOOD, num_samples=2**50), TASK).num_samples == 100


def test_names():
    assert objection_to_name("jetson-orin") == ""
    for bad in ("", "x" * 201, "\x1b[2J", "two\nlines"):
        assert objection_to_name(bad, "device type").startswith("the device type")


def test_clean_text():
    assert clean("fine") == "fine"
    assert "\x1b" not in clean("\x1b]0;PWNED\x07")
    assert len(clean("y" * 4_000_000)) == MAX_TEXT + 3


@pytest.mark.parametrize("places", [[], [0], [1], [0, 1]])
def test_tensors_that_the_model_has_may_be_wanted(places):
    assert objection_to_wanted(places, [-1] * len(places), SPEC) == ""


@pytest.mark.parametrize(
    ("places", "versions"),
    [
        ([0], []),
        ([], [0]),
        ([0, 1], [0]),
        ([2], [0]),
        ([-1], [0]),
        ([0, 0], [0, 1]),
        ([1, 0], [0, 0]),
        ([0] * 100_000, [0] * 100_000),
        ([2**31 - 1], [2**31 - 1]),
    ],
)
def test_other_tensors_may_not(places, versions):
    assert 0 < len(objection_to_wanted(places, versions, SPEC)) < MAX_TEXT
