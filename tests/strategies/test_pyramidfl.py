"""PyramidFL: Oort's pieces by hand, local steps, dropped tensors, what the planner remembers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedel.core import oort
from fedel.core.timing import full_step
from fedel.strategies.fedavg import FedAvg
from fedel.strategies.pyramidfl import PyramidFL, local_steps
from fedel.types import Memory, Report, Role
from tests.simulation.history import run_rounds
from tests.strategies.fakes import WORK, Recorder, context_of, fleet, initial_model, profile, same_bits, spec


def report(client: str, round_num: int, loss_square: float, norm: float = 1.0) -> Report:
    return Report(client, round_num, 100, 4, 4.0, 1.0, loss_square=loss_square, update_norm=norm)


def known(**utilities: float) -> dict[str, Any]:
    """A planner's state in which these clients were seen in the first round."""
    strategy = PyramidFL()
    return {
        "exploration": strategy.exploration,
        "round_threshold": strategy.round_threshold,
        "utilities": utilities,
        "durations": {},
        "last_rounds": dict.fromkeys(utilities, 1),
        "norms": {},
        "exploited": [],
        "passed_over": [],
        "history": [],
    }


def test_utility_counts_the_samples_that_were_trained() -> None:
    assert oort.utility(9.0, num_samples=50, trained_samples=20) == 60.0
    assert oort.utility(9.0, num_samples=10, trained_samples=20) == 30.0


def test_penalty_is_for_slow_clients_only() -> None:
    assert oort.penalty(30.0, preferred=10.0, exponent=2.0) == pytest.approx(1 / 9)
    assert oort.penalty(10.0, preferred=10.0, exponent=2.0) == 1.0
    assert oort.penalty(30.0, preferred=10.0, exponent=0.0) == 1.0
    assert oort.penalty(30.0, preferred=math.inf, exponent=2.0) == 1.0


def test_scores_by_hand() -> None:
    found = oort.scores(
        {"a": 10.0, "b": 20.0, "c": 110.0},
        {"a": 1, "b": 4, "c": 2},
        {"a": 5.0, "b": 20.0, "c": 10.0},
        current_round=8,
        preferred=10.0,
        exponent=2.0,
        clip=0.5,
    )
    # Clipped at 20, the value half way; the least is 9.99 and the spread 110 - 9.99.
    spread, bonus = 110 - 9.99, 0.1 * math.log(8)
    assert found == pytest.approx(
        {
            "a": 0.01 / spread + math.sqrt(bonus),
            "b": (10.01 / spread + math.sqrt(bonus / 4)) / 4,
            "c": 10.01 / spread + math.sqrt(bonus / 2),
        }
    )


def test_clients_far_below_the_cut_are_never_drawn() -> None:
    scored = {"a": 1.0, "b": 0.9, "c": 0.8, "d": 0.5}
    seen = {n for seed in range(50) for n in oort.exploit(scored, 2, 0.7, np.random.default_rng(seed))}
    assert seen == {"a", "b", "c"}  # the cut is 0.7 times c's score


def test_exploration_prefers_much_data_on_fast_devices() -> None:
    rewards = {f"c{i}": float(i + 1) for i in range(12)}
    drawn = Counter(n for seed in range(300) for n in oort.explore(rewards, 2, np.random.default_rng(seed)))
    assert not drawn.keys() & {"c0", "c1"}  # not among the ten most promising
    assert drawn["c11"] > drawn["c2"]


def test_pacer_waits_for_two_windows_and_stays_within_bounds() -> None:
    assert oort.pace(30, [1.0] * 39, 39, every=20, delta=5) == 30
    assert oort.pace(30, [1.0] * 20, 20, every=20, delta=5) == 30
    assert oort.pace(30, [1.0] * 40, 40, every=20, delta=5) == 35
    assert oort.pace(98, [1.0] * 40, 40, every=20, delta=5) == 100
    assert oort.pace(7, [1.0] * 20 + [6.0] * 20, 40, every=20, delta=5) == 5
    assert oort.pace(30, [1.0] * 20 + [2.0] * 20, 40, every=20, delta=5) == 30


def test_local_steps_fill_the_wait() -> None:
    assert local_steps(5, local_seconds=10, waiting_seconds=20) == 15
    assert local_steps(5, local_seconds=10, waiting_seconds=20, bonus=0.5) == 10
    assert local_steps(5, local_seconds=10, waiting_seconds=1.9) == 5
    assert local_steps(5, local_seconds=10, waiting_seconds=1e6) == 55


def test_fast_clients_train_on_until_the_slowest_is_done() -> None:
    clients = {f"c{s}": Recorder(s, 1000, profile(s)) for s in (1, 2, 4)}
    plan = PyramidFL().plan(context_of(clients))
    assert [task.work.num_steps for task in plan.tasks] == [16, 8, 4]


def test_steps_stop_at_five_passes_over_the_data() -> None:
    clients = {"small": Recorder(1, 8, profile()), "slow": Recorder(2, 8, profile(4))}
    assert [t.work.num_steps for t in PyramidFL().plan(context_of(clients)).tasks] == [5, 4]
    work = replace(WORK, num_steps=7)
    assert [t.work.num_steps for t in PyramidFL().plan(context_of(clients, work=work)).tasks] == [7, 7]


def test_drop_ratio_rises_with_the_rank_of_the_last_update() -> None:
    clients = {name: Recorder(1, 100, profile()) for name in ("a", "b", "c")}
    last = {name: report(name, 0, 1.0, norm) for name, norm in (("a", 1.0), ("b", 9.0), ("c", 4.0))}
    strategy = PyramidFL(drop_low=0.1, drop_high=0.7)
    plan = strategy.plan(context_of(clients, 1, state=known(), last=last))
    assert [task.settings["drop"] for task in plan.tasks] == pytest.approx([0.5, 0.1, 0.3])


def test_less_to_send_leaves_more_time_to_train() -> None:
    clients = {name: Recorder(1, 1000, profile()) for name in ("a", "b")}
    last = {"a": report("a", 0, 1.0, norm=9.0), "b": report("b", 0, 1.0, norm=1.0)}
    step = full_step(profile()).total("backward")
    strategy = PyramidFL(drop_low=0.0, drop_high=1.0, comm_seconds=6 * step)
    plan = strategy.plan(context_of(clients, 1, state=known(), last=last))
    assert [task.settings["drop"] for task in plan.tasks] == [0.0, 0.5]
    assert [task.work.num_steps for task in plan.tasks] == [4, 7]


def test_dropped_tensors_count_as_no_change_unless_mask_aware() -> None:
    clients, model = {n: Recorder(i, 20, profile()) for i, n in enumerate("abcd")}, initial_model()
    for strategy in (
        PyramidFL(drop_low=0.5, drop_high=0.5),
        PyramidFL(drop_low=0.5, drop_high=0.5, mask_aware=True),
    ):
        fold, sent = strategy.fold(spec()), []
        for task in strategy.plan(context_of(clients)).tasks:
            sent.append(strategy.fit(task, model, Memory(), clients[task.client])[0])
            fold.add(sent[-1])
        new = fold.finish(model, {}).model
        counts = Counter(name for update in sent for name in update.patches)
        assert set(counts.values()) >= {1, 2, 3}
        for name, count in counts.items():
            total = sum(u.patches[name].values - model[name] for u in sent if name in u.patches)
            expected = model[name] + total / (count if strategy.mask_aware else 4)
            np.testing.assert_allclose(new[name], expected, rtol=1e-4, atol=1e-6)


def test_everything_can_be_dropped_but_statistics() -> None:
    client, model = Recorder(1, 20, profile()), initial_model()
    strategy = PyramidFL(drop_low=1.0, drop_high=1.0)
    update, _ = strategy.fit(strategy.plan(context_of({"a": client})).tasks[0], model, Memory(), client)
    assert set(update.patches) == {t.name for t in spec().tensors if t.role is Role.BUFFER}
    assert update.report.update_norm > 0


def test_planner_learns_from_reports_and_forgets_nothing() -> None:
    clients = {name: Recorder(1, 100, profile()) for name in ("a", "b", "c", "d")}
    state = {**known(a=5.0, d=7.0), "exploited": ["a"], "passed_over": ["c"], "history": [1.0]}
    last = {"a": report("a", 2, 4.0), "b": report("b", 2, 16.0, norm=3.0), "d": report("d", 0, 1.0)}
    learnt = PyramidFL().plan(context_of(clients, 3, num_participants=2, state=state, last=last)).state
    # Four steps of eight samples: 32 of each client's 100.
    assert learnt["utilities"] == {"a": 64.0, "b": 128.0, "c": 96.0, "d": 7.0}
    assert learnt["last_rounds"] == {"a": 3, "b": 3, "c": 3, "d": 1}
    assert learnt["norms"] == pytest.approx({"a": 0.32, "b": 0.96})
    assert learnt["history"] == [1.0, 64.0]
    assert learnt["exploration"] == pytest.approx(0.9 * 0.95)


def test_exploration_decays_to_its_floor() -> None:
    history = run_rounds(PyramidFL(exploration_decay=0.5), 5, num_participants=3)
    assert [plan.state["exploration"] for plan in history.plans] == pytest.approx([0.9, 0.45, 0.225, 0.2, 0.2])


def test_the_fastest_of_the_invited_are_kept() -> None:
    clients = fleet(8)
    plan = PyramidFL(over_commit=2.0).plan(context_of(clients, num_participants=4))
    assert sorted(clients[task.client].profile.device for task in plan.tasks) == ["fake/1"] * 2 + ["fake/2"] * 2
    assert len(plan.state["passed_over"]) == 4
    assert [task.client for task in plan.tasks] == sorted(task.client for task in plan.tasks)


def test_without_exploration_high_utilities_win() -> None:
    clients = {f"c{i}": Recorder(i, 100, profile()) for i in range(6)}
    state = known(**{f"c{i}": 100.0 * (i >= 4) + 1 for i in range(6)})
    strategy = PyramidFL(exploration=0.0, exploration_min=0.0, over_commit=1.0, cut_off=1.0, clip=1.0)
    plan = strategy.plan(context_of(clients, 1, num_participants=1, state={**state, "exploration": 0.0}))
    assert {task.client for task in plan.tasks} < {"c4", "c5"}
    assert plan.state["exploited"] == [task.client for task in plan.tasks]


def test_equal_devices_that_all_take_part_are_fedavg() -> None:
    clients = {f"c{i}": Recorder(i, 10 + i, profile()) for i in range(4)}
    pyramid = run_rounds(PyramidFL(), 4, clients).model
    assert same_bits(pyramid, run_rounds(FedAvg(weighting="uniform"), 4, clients).model)


def test_rounds_last_no_longer_than_the_slowest_participant() -> None:
    history = run_rounds(PyramidFL(), 6, fleet(12), num_participants=5)
    for plan, updates in zip(history.plans, history.updates, strict=True):
        seconds = [u.report.cost.total("backward") * u.report.num_steps for u in updates]
        slowest = max(plan.state["durations"][u.report.client] for u in updates)
        assert max(seconds) <= slowest * (1 + 1e-9)
        assert len(updates) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exploration": 1.5}, "exploration = 1.5"),
        ({"cut_off": -0.5}, "cut_off = -0.5"),
        ({"drop_low": 0.5, "drop_high": 0.2}, "drop_low = 0.5, drop_high = 0.2"),
        ({"over_commit": 0.9}, "over_commit = 0.9"),
        ({"pacer_rounds": 0}, "pacer_rounds = 0"),
        ({"round_threshold": 0.0}, "round_threshold = 0"),
        ({"comm_seconds": -1.0}, "comm_seconds = -1"),
        ({"weighting": "size"}, "not one of: uniform, samples"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PyramidFL(**options)
