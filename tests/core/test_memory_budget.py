"""Bytes of a step, and what fits a limit."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.core.memory_budget import fits, keep_within, probe_bytes, step_bytes
from fedel.types import (
    BlockBytes,
    BlockTime,
    MemoryUse,
    ModelSpec,
    Role,
    TensorSpec,
    TensorTime,
    TimingProfile,
    Window,
)

NAMES = ("one", "two", "three", "four")
WEIGHTS = {1: ("a", "b"), 2: ("c", "d"), 3: ("e",), 4: ("f",)}
SIZES = {"a": 10, "b": 1, "c": 100, "d": 5, "e": 50, "f": 20}


def spec_of(exit_each: bool = False) -> ModelSpec:
    tensors = []
    for block, names in WEIGHTS.items():
        tensors += [TensorSpec(n, block, (SIZES[n],), Role.WEIGHT) for n in names]
        if block < 4 and not exit_each:
            tensors.append(TensorSpec(f"exit{block}", block, (3,), Role.EXIT))
    return ModelSpec("toy", NAMES, tuple(tensors), (4,), exit_each)


SPEC = spec_of()
MODEL = sum(t.size for t in SPEC.tensors) * 4
USE = MemoryUse(
    base_bytes=1000,
    input_bytes=7,
    optimiser_values=1,
    blocks=(
        BlockBytes(400, 300, 200, 90, 91),
        BlockBytes(300, 200, 150, 60, 61),
        BlockBytes(200, 100, 100, 30, 31),
        BlockBytes(100, 50, 50, 10, 11),
    ),
)


def profile_of(use: MemoryUse | None = USE) -> TimingProfile:
    times = tuple(TensorTime(t.name, t.block, 1.0, 1.0) for t in SPEC.weights)
    return TimingProfile("d", "toy", 4, times, (BlockTime(1.0),) * 4, memory=use)


def test_step_by_hand() -> None:
    # Blocks 2 and 3 keep 500, the front uses 100 besides; block 1's output enters, block 2's would be less.
    trained = (100 + 50 + 3) * 4
    by_hand = 1000 + MODEL + 7 + 2 * trained + (300 + 200 + 100) + 90
    assert max(trained, 200 + 2 * 90) < 300 + 200 + 100 + 90
    assert by_hand == step_bytes(SPEC, USE, {"c", "e"}, Window(2, 3))


def test_activations_depend_on_the_shallowest_only() -> None:
    for name, kept in (("b", 1000), ("d", 600), ("e", 300)):
        state = 2 * SIZES[name] * 4
        # The last block uses 50 besides what is kept; the batch is there twice, as it came and as it enters.
        assert 1000 + MODEL + 2 * 7 + state + kept + 50 == step_bytes(SPEC, USE, {name}, Window(1, 4))


def test_exit_only_costs_the_frozen_pass() -> None:
    assert step_bytes(SPEC, USE, (), Window(3, 3)) == 1000 + MODEL + 7 + 2 * 12 + (90 + 150) + 2 * 60


def test_a_frozen_trunk_keeps_what_its_exits_keep() -> None:
    spec = spec_of(exit_each=True)
    one, both = (step_bytes(spec, USE, names, Window(1, 3)) for names in ({"e"}, {"d", "e"}))
    assert both - one == 61 + 2 * 5 * 4


def test_no_training_inside_a_window_takes_more_than_its_probe() -> None:
    for end in range(1, 5):
        for front in range(end, 5):
            window = Window(end, front)
            names = [t.name for t in SPEC.weights_in(end, front)]
            most = probe_bytes(SPEC, USE, window)
            for count in range(len(names) + 1):
                for selected in combinations(names, count):
                    assert step_bytes(SPEC, USE, selected, window) <= most


def test_no_limit_and_no_measurement_let_everything_pass() -> None:
    window = Window(1, 4)
    assert fits(SPEC, profile_of(), window, 0)
    assert fits(SPEC, profile_of(None), window, 1)
    assert not fits(SPEC, profile_of(), window, 1)
    assert {"a"} == keep_within(SPEC, profile_of(None), {"a"}, window, {}, 1)


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.sampled_from(sorted(SIZES)), min_size=1),
    st.dictionaries(st.sampled_from(sorted(SIZES)), st.floats(0, 10)),
    st.integers(1, 8000),
)
def test_selection_is_never_over(selected: set[str], importance: dict[str, float], limit: int) -> None:
    window = Window(1, 4)
    kept = keep_within(SPEC, profile_of(), selected, window, importance, limit)
    assert kept <= selected
    assert not kept or step_bytes(SPEC, USE, kept, window) <= limit
    if step_bytes(SPEC, USE, selected, window) <= limit and all(importance.get(n, 0) > 0 for n in selected):
        assert kept == selected, "what fits stays"


def test_least_importance_for_its_bytes_goes_first() -> None:
    importance = {"c": 5.0, "d": 1.0, "e": 4.0}
    window = Window(2, 3)
    limit = step_bytes(SPEC, USE, {"c", "d", "e"}, window) - 1
    assert {"d", "e"} == keep_within(SPEC, profile_of(), {"c", "d", "e"}, window, importance, limit)


def test_deeper_tensors_stay_where_the_way_back_is_too_long() -> None:
    importance = {"a": 9.0, "e": 1.0}
    limit = step_bytes(SPEC, USE, {"e"}, Window(1, 3))
    assert {"e"} == keep_within(SPEC, profile_of(), {"a", "e"}, Window(1, 3), importance, limit)


@pytest.mark.parametrize("window", [Window(1, 1), Window(2, 4)])
def test_fits_is_exact(window: Window) -> None:
    most = probe_bytes(SPEC, USE, window)
    assert fits(SPEC, profile_of(), window, most)
    assert not fits(SPEC, profile_of(), window, most - 1)
