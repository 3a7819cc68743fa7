from dataclasses import replace

import pytest

from fedel.core import timing
from fedel.errors import ConfigError
from fedel.types import BlockTime, StepCost, TensorTime, TimingProfile, WidthTime


def profile(**changes):
    tensors = tuple(
        TensorTime(f"{b}.{kind}", b, grad, update)
        for b in (1, 2, 3)
        for kind, grad, update in (("kernel", 2.0 * b, 4.0 * b), ("bias", 0.0, 0.5))
    )
    blocks = (BlockTime(1.0, 0.1, 0.2), BlockTime(2.0, 0.1, 0.2), BlockTime(3.0))
    return TimingProfile("fast", "toy", 4, tensors, blocks, **changes)


@pytest.mark.parametrize(
    ("selected", "expected"),
    [({2, 4}, 16 + 800 + 8 + 4 + 200), ({5}, 1600), (set(), 0), ({1}, 2 + 4 + 8 + 16 + 100)],
)
def test_backward_pays_updates_and_the_way_to_the_shallowest(selected, expected):
    grads, updates = [1, 2, 4, 8, 16], [100, 200, 400, 800, 1600]
    assert expected == timing.backward_seconds(grads, updates, [k in selected for k in range(1, 6)])


def test_block_seconds_are_backward_only_unless_the_whole_step_counts():
    assert [4.5, 12.5, 18.5] == timing.block_seconds(profile())
    assert [5.5, 14.5, 21.5] == timing.block_seconds(profile(), "train")


def test_the_whole_step_is_priced_like_a_window_of_all_blocks():
    """Nobody computes the gradient of the data, so no method pays the first tensor's way through."""
    every = {t.name for t in profile().tensors}
    whole = timing.full_step(profile(overhead_seconds=0.25))
    assert whole == timing.step_cost(profile(overhead_seconds=0.25), every, exits=(3,))
    assert StepCost(1 + 2 + 3 + 0.25, 4.5 + 12.5 + 18.5) == whole
    assert sum(timing.block_seconds(profile())) == whole.backward_seconds


def test_a_window_costs_its_forward_its_exit_and_its_own_backward():
    cost = timing.step_cost(profile(overhead_seconds=0.25), {"2.kernel"}, exits=(2,), end=2)
    assert StepCost(1 + 2 + 0.1 + 0.25, 0.2 + 8.0 + 0.0) == cost


def test_frozen_blocks_cost_their_own_price_where_it_is_known():
    cheap = BlockTime(1.0, 0.1, 0.2, frozen_forward_seconds=0.4)
    known = replace(profile(), blocks=(cheap, *profile().blocks[1:]))
    assert 0.4 + 2 + 0.1 == pytest.approx(timing.step_cost(known, (), exits=(2,), end=2).forward_seconds)
    assert 1.0 + 2 + 0.1 == pytest.approx(timing.step_cost(known, (), exits=(2,), end=1).forward_seconds)


def test_blocks_beyond_the_front_cost_nothing():
    all_names = {t.name for t in profile().tensors}
    cost = timing.step_cost(profile(), all_names, exits=(1,))
    assert StepCost(1.1, 0.2 + 4.0 + 0.0 + 0.5) == cost


def test_independent_exits_do_not_pay_for_each_other():
    chained = timing.step_cost(profile(), {"1.bias", "3.bias"}, exits=(1, 2, 3))
    separate = timing.step_cost(profile(), {"1.bias", "3.bias"}, exits=(1, 2, 3), exit_each=True)
    assert 0.4 + 1.0 + 4.0 + 6.0 == chained.backward_seconds
    assert 0.4 + 1.0 == separate.backward_seconds


def test_independent_updates_bound_the_true_cost_of_an_exit():
    times = [TensorTime("a", 1, 1.0, 2.0), TensorTime("b", 1, 4.0, 8.0), TensorTime("c", 2, 16.0, 32.0)]
    assert [2.0 + 4.0, 8.0, 32.0] == timing.independent_updates(times)


def test_budget_policies():
    fleet = [profile().scaled(s) for s in (1, 2, 3, 4)]
    full = timing.full_step(profile())
    assert full.total("backward") == timing.budget(timing.full_steps(fleet, "backward"), "fastest")
    assert full.total("train") == timing.budget(timing.full_steps(fleet), "fastest")
    assert 2 * full.total("train") == timing.budget(timing.full_steps(fleet), "percentile", 50)
    assert 0.5 * full.total("train") == timing.budget(timing.full_steps(fleet), "share", 0.5)
    assert 1.5 == timing.budget([], "fixed", 1.5)


@pytest.mark.parametrize(("policy", "value"), [("fixed", 0.0), ("percentile", 200.0), ("slowest", 0.0)])
def test_a_wrong_budget_policy_says_what_is_valid(policy, value):
    with pytest.raises(ConfigError, match="budget"):
        timing.budget(timing.full_steps([profile()]), policy, value)


def test_a_narrow_step_is_interpolated_between_measurements():
    measured = profile(widths=(WidthTime(0.5, 2.0, 10.0),))
    assert StepCost(2.0, 10.0) == timing.width_step(measured, 0.5)
    assert timing.full_step(measured) == timing.width_step(measured, 1.0)
    middle = timing.width_step(measured, 0.75)
    assert (2.0 + 6.0) / 2 == pytest.approx(middle.forward_seconds)
    assert (10.0 + 35.5) / 2 == pytest.approx(middle.backward_seconds)


def test_scaling_a_profile_scales_every_second_in_it():
    slow = profile(overhead_seconds=1.0, widths=(WidthTime(0.5, 2.0, 10.0),)).scaled(3)
    fast = profile(overhead_seconds=1.0, widths=(WidthTime(0.5, 2.0, 10.0),))
    assert 3 * timing.full_step(fast).total("train") == pytest.approx(timing.full_step(slow).total("train"))
    assert StepCost(6.0, 30.0) == timing.width_step(slow, 0.5)
    one = timing.step_cost(fast, {"2.bias"}, (2,))
    three = timing.step_cost(slow, {"2.bias"}, (2,))
    assert 3 * one.total("train") == pytest.approx(three.total("train"))
