import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel.core import selection
from fedel.core.selection import select
from fedel.core.selection_official import _table, select_official
from fedel.core.timing import backward_seconds

# The vectors are written from the output inwards (index 0 is closest to the output).
GRAD, UPDATE, VALUE = [0, 2, 1, 4, 0], [5, 1, 7, 3, 1], [1, 3, 10, 5, 3]


def output_first(method, budget, grad=GRAD, update=UPDATE, value=VALUE, **options):
    chosen = method(grad[::-1], update[::-1], value[::-1], budget, **options)[::-1]
    return sum(v for v, c in zip(value, chosen, strict=True) if c), {k for k, c in enumerate(chosen) if c}


def brute_force(grad, update, value, budget):
    best = 0
    for mask in itertools.product([False, True], repeat=len(value)):
        if backward_seconds(grad, update, mask) <= budget:
            best = max(best, sum(v for v, c in zip(value, mask, strict=True) if c))
    return best


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(7, (8, {1, 3})), (14, (18, {1, 2, 3})), (19, (21, {1, 2, 3, 4})), (24, (22, {0, 1, 2, 3, 4}))],
)
def test_vectors_with_the_exclusive_cost(budget, expected):
    assert expected == output_first(select, budget)


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(7, (3, {1})), (14, (13, {1, 2})), (19, (18, {1, 2, 3})), (24, (19, {0, 1, 2, 3}))],
)
def test_vectors_of_the_reference(budget, expected):
    assert expected == output_first(select_official, budget, num_bins=24)


def test_the_reference_misses_the_optimum_where_the_exact_selection_finds_it():
    grad, update, value = [0, 5, 0, 0], [5, 0, 0, 0], [5, 1, 10, -1]
    chosen = _table(grad, update, value, 5)
    assert [False, False, True, False] == chosen
    assert (11, {1, 2}) == output_first(select, 5, grad[:3], update[:3], value[:3])


lengths = st.integers(1, 12)
whole_seconds = st.integers(0, 12)
values = st.integers(-3, 12)


@given(data=st.data(), n=lengths, budget=st.integers(0, 60))
def test_equals_brute_force_on_whole_seconds(data, n, budget):
    grad, update, value = (
        data.draw(st.lists(kind, min_size=n, max_size=n)) for kind in (whole_seconds, whole_seconds, values)
    )
    chosen = select(grad, update, value, budget)
    assert brute_force(grad, update, value, budget) == sum(v for v, c in zip(value, chosen, strict=True) if c)
    assert backward_seconds(grad, update, chosen) <= budget
    assert not any(c and v <= 0 for v, c in zip(value, chosen, strict=True))


@settings(deadline=None)
@given(data=st.data(), n=lengths, budget=st.floats(0, 50))
def test_equals_brute_force_on_real_seconds(data, n, budget):
    seconds = st.lists(st.floats(0, 10), min_size=n, max_size=n)
    grad, update = data.draw(seconds), data.draw(seconds)
    value = data.draw(st.lists(st.floats(-1, 1), min_size=n, max_size=n))
    chosen = select(grad, update, value, budget)
    found = sum(v for v, c in zip(value, chosen, strict=True) if c)
    assert backward_seconds(grad, update, chosen) <= budget
    # Sums of floats in another order differ in the last digits, at the edge of the budget too.
    assert brute_force(grad, update, value, budget * (1 - 1e-9)) <= found + 1e-9
    assert found <= brute_force(grad, update, value, budget) + 1e-9


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_hundreds_of_tensors_stay_in_budget_and_close_to_the_bound(seed):
    rng = np.random.default_rng(seed)
    grad, update = rng.gamma(0.5, size=161), rng.gamma(0.5, size=161)
    value = rng.normal(size=161)
    budget = rng.uniform(0.05, 0.95) * (grad.sum() + update.sum())
    chosen = select(grad, update, value, budget)
    assert backward_seconds(grad, update, chosen) <= budget
    # Rounding up costs each tensor at most one bin: a budget smaller by that much is met in full.
    smaller = budget * (1 - 2 * 161 / selection.NUM_BINS)
    assert selected_value(value, exact(grad, update, value, smaller)) <= selected_value(value, chosen) + 1e-9


def exact(grad, update, value, budget):
    """The same scan, with a frontier that may grow."""
    frontier = selection._Frontier(budget)
    frontier_limit, selection.MAX_FRONTIER = selection.MAX_FRONTIER, 10**9
    try:
        return selection._scan(frontier, list(grad), list(update), list(value), budget)
    finally:
        selection.MAX_FRONTIER = frontier_limit


def selected_value(value, chosen):
    return float(sum(v for v, c in zip(value, chosen, strict=True) if c))


def test_everything_useful_is_chosen_when_it_fits():
    assert [True, False, True] == select([1, 1, 1], [1, 1, 1], [1, 0, 2], float("inf"))


def test_among_equals_the_cheaper_set_wins():
    assert [False, True] == select([0, 0], [3, 2], [1, 1], 4)


def test_nothing_fits_a_budget_below_zero():
    assert [False, False] == select([0, 0], [0, 0], [1, 1], -1)


@pytest.mark.parametrize("lists", [([1], [1, 2], [1, 2]), ([-1.0], [1.0], [1.0])])
def test_wrong_input_is_named(lists):
    with pytest.raises(ValueError, match="select needs"):
        select(*lists, 1)
