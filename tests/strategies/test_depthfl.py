"""DepthFL: depths from the budget, exits on the way, the distillation ramp, FedDyn's two memories."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedel.core.timing import full_step
from fedel.strategies.depthfl import DepthFL, Distillation, FedDyn, depths, exits_of, prefix_step, ramp
from fedel.types import Memory, Role
from tests.simulation.history import run_rounds
from tests.strategies.fakes import Recorder, context_of, frozen_spec, initial_model, profile, spec


def test_ramp_follows_the_round() -> None:
    assert [ramp(t, 300) for t in (0, 150, 300, 999)] == [math.exp(-5), math.exp(-1.25), 1.0, 1.0]


def test_distillation_has_its_full_weight_after_a_share_of_the_run_however_short() -> None:
    def strength(round_num: int, num_rounds: int) -> float:
        context = replace(context_of({"a": Recorder(1, 20, profile())}, round_num), num_rounds=num_rounds)
        return DepthFL().plan(context).tasks[0].settings["distil"]

    assert [strength(t, 1000) for t in (0, 150, 300)] == pytest.approx([math.exp(-5), math.exp(-1.25), 1.0])
    assert [strength(t, 80) for t in (0, 12, 24, 79)] == pytest.approx(
        [math.exp(-5), math.exp(-1.25), 1.0, 1.0]
    )


def test_cuts_are_the_stages_or_else_quarters() -> None:
    assert depths(spec()) == (2, 4, 6)
    assert depths(replace(spec(), stages=())) == (2, 3, 5, 6)
    assert depths(replace(spec(), stages=(6,))) == (2, 3, 5, 6)


def test_exits_of_a_prefix() -> None:
    assert exits_of(spec(), 4) == (2, 4)
    assert exits_of(frozen_spec(), 3) == (1, 2, 3)


def test_prefix_step_by_hand() -> None:
    cost = prefix_step(spec(), profile(), 2)
    # Blocks 1 and 2 forward 2 + 4 ms, exit 1 ms, overhead 1 ms. Updates 12 + 4 + 24 + 6 + 6 + 6 ms, the
    # second kernel passed through for 12 ms (the first need not be), exit backward 2 ms.
    assert (cost.forward_seconds, cost.backward_seconds) == pytest.approx((0.008, 0.072))


def test_depth_is_the_deepest_prefix_that_fits() -> None:
    slow = profile(2)
    budgets = [prefix_step(spec(), slow, depth).total("backward") for depth in (2, 4)]
    assert [DepthFL().depth_for(spec(), slow, seconds) for seconds in budgets] == [2, 4]
    assert DepthFL().depth_for(spec(), slow, budgets[1] * 0.999) == 2


def test_a_device_that_keeps_the_budget_with_the_plain_model_trains_all_of_it() -> None:
    dear_exits = replace(
        profile(), blocks=tuple(replace(b, exit_backward_seconds=1.0) for b in profile().blocks)
    )
    history = run_rounds(DepthFL(), 1, {"a": Recorder(1, 20, dear_exits)})
    assert history.plans[0].tasks[0].settings["depth"] == 6
    assert history.reports[0].cost.backward_seconds > history.budget_seconds
    assert not history.reports[0].over_budget


def test_nothing_fits_takes_the_shallowest_and_says_so() -> None:
    history = run_rounds(DepthFL(), 1, budget_seconds=1e-9)
    assert {task.settings["depth"] for task in history.plans[0].tasks} == {2}
    assert all(report.over_budget for report in history.reports)


@pytest.mark.parametrize(("slowness", "exits", "distils"), [(4, (2,), False), (1, (2, 4, 6), True)])
def test_job_trains_the_prefix_and_distils_only_between_exits(
    slowness: float, exits: tuple[int, ...], distils: bool
) -> None:
    client = Recorder(1, 20, profile(slowness))
    strategy, budget = DepthFL(), full_step(profile()).total("backward")
    context = replace(context_of({"a": client}, round_num=150, budget_seconds=budget), num_rounds=1000)
    task = strategy.plan(context).tasks[0]
    update, _ = strategy.fit(task, initial_model(), Memory(), client)
    (train_spec,) = client.asked
    assert train_spec.exits == exits
    assert train_spec.selected == {t.name for t in spec().weights_in(1, exits[-1])}
    assert train_spec.hooks == ((Distillation(task.settings["distil"]),) if distils else ())
    assert task.settings["distil"] == pytest.approx(math.exp(-1.25))
    heads = {name for name in update.patches if spec().by_name[name].role is Role.EXIT}
    assert heads == {t.name for t in spec().tensors if t.role is Role.EXIT and t.block in exits}


def test_blocks_deeper_than_everybody_keep_their_bits() -> None:
    history = run_rounds(DepthFL(), 3, {"a": Recorder(1, 20, profile())}, budget_seconds=0.08)
    assert {task.settings["depth"] for plan in history.plans for task in plan.tasks} == {2}
    for t in spec().tensors:
        moved = history.model[t.name].tobytes() != history.models[0][t.name].tobytes()
        assert moved == (t.block <= 2 and not (t.role is Role.EXIT and t.block == 1)), t.name


def test_feddyn_moves_the_client_memory_against_its_update() -> None:
    client, model = Recorder(1, 20, profile()), initial_model()
    strategy = DepthFL(feddyn_alpha=0.5, num_clients=4)
    task = strategy.plan(context_of({"a": client})).tasks[0]
    first, memory = strategy.fit(task, model, Memory(), client)
    name = "blocks.three.conv.weight"
    change = first.patches[name].values - model[name]
    np.testing.assert_allclose(memory.tensors[name], -0.5 * change, rtol=1e-6)
    assert not [n for n in memory.tensors if spec().by_name[n].role is Role.BUFFER]
    second, later = strategy.fit(task, model, memory, client)
    (hook,) = (hook for hook in client.asked[1].hooks if isinstance(hook, FedDyn))
    assert hook.drift is memory.tensors
    assert hook.alpha == 0.5
    change = second.patches[name].values - model[name]
    np.testing.assert_allclose(later.tensors[name], memory.tensors[name] - 0.5 * change, rtol=1e-5)


def test_feddyn_fold_by_hand() -> None:
    strategy = DepthFL(feddyn_alpha=0.5, num_clients=4)
    clients = {"a": Recorder(1, 20, profile(1)), "b": Recorder(2, 30, profile(4))}
    model, fold = initial_model(), strategy.fold(spec())
    sent = []
    for task in strategy.plan(context_of(clients)).tasks:
        update, _ = strategy.fit(task, model, Memory(), clients[task.client])
        sent.append(update.patches)
        fold.add(update)
    shared, deep, statistics = (
        "blocks.stem.conv.weight",
        "blocks.classifier.linear.weight",
        "blocks.norm.bn.running_mean",
    )
    old_drift = {"feddyn/" + deep: np.full_like(model[deep], 0.25)}
    folded = fold.finish(model, old_drift)

    mean = (sent[0][shared].values + sent[1][shared].values) / 2
    drift = -0.5 * (2 / 4) * (mean - model[shared])
    np.testing.assert_allclose(folded.state["feddyn/" + shared], drift, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(folded.model[shared], mean - drift / 0.5, rtol=1e-4, atol=1e-6)

    mean = sent[0][deep].values
    drift = 0.25 - 0.5 * (1 / 4) * (mean - model[deep])
    np.testing.assert_allclose(folded.model[deep], mean - drift / 0.5, rtol=1e-4, atol=1e-6)

    mean = (sent[0][statistics].values + sent[1][statistics].values) / 2
    np.testing.assert_allclose(folded.model[statistics], mean, rtol=1e-6)
    assert "feddyn/" + statistics not in folded.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ramp": 1.5}, "ramp = 1.5"),
        ({"feddyn_alpha": -0.1}, "feddyn_alpha = -0.1"),
        ({"feddyn_alpha": 0.1}, "needs num_clients"),
        ({"budget_scope": "x"}, "budget_scope = 'x'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DepthFL(**options)  # type: ignore[arg-type]
