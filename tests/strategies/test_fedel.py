import itertools
from dataclasses import replace

import numpy as np
import pytest

from fedel.core.budgeted import Choice, Prices, choose, window_cost
from fedel.core.timing import block_seconds, full_step
from fedel.strategies import ElasticTrainer, FedAvg, FedEL, base
from fedel.types import FREE, Memory, Role, Window
from tests.simulation.history import run_rounds
from tests.strategies import fakes
from tests.strategies.fakes import FakeTrainer, Recorder, context_of, fleet, same_bits


class Helpful(FakeTrainer):
    """A trainer whose probe finds every tensor useful."""

    def probe(self, model, window, work, seed):
        return {t.name: -float(t.size) for t in self.spec.weights_in(window.end, window.front)}


def helpful_fleet(count=6):
    return {name: Helpful(**vars(client)) for name, client in fleet(count).items()}


def task_for(client, strategy=None, **changes):
    plan = (strategy or FedEL()).plan(context_of({"c": client}))
    return replace(plan.tasks[0], **changes)


def test_with_time_for_everything_it_is_fedavg_with_equal_weights():
    clients = helpful_fleet()
    mine = run_rounds(FedEL(), 4, clients, budget_seconds=1e9)
    theirs = run_rounds(FedAvg(weighting="uniform"), 4, clients, budget_seconds=1e9)
    weights = [t.name for t in fakes.spec().tensors if t.role is not Role.EXIT]
    assert same_bits({n: theirs.model[n] for n in weights}, {n: mine.model[n] for n in weights})


def test_training_all_that_fits_needs_no_importance_to_be_fedavg():
    mine = run_rounds(FedEL(train_all_that_fits=True), 4, budget_seconds=1e9)
    theirs = run_rounds(FedAvg(weighting="uniform"), 4, budget_seconds=1e9)
    assert same_bits(theirs.model, mine.model)
    assert all(report.probe == FREE for report in mine.reports)


@pytest.mark.parametrize("kind", [FedEL, ElasticTrainer])
def test_the_probe_can_come_out_of_the_budget(kind):
    def shares(num_steps=20, **options):
        work = replace(fakes.WORK, num_steps=num_steps)
        history = run_rounds(kind(**options), 8, helpful_fleet(), work=work)
        return [
            (r.cost.backward_seconds + r.probe.backward_seconds / r.num_steps) / history.budget_seconds
            for r in history.reports
            if not r.over_budget
        ]

    assert max(shares()) > 1.01
    assert 0.5 < max(shares(probe_in_budget=True)) <= 1 + 1e-6
    assert shares(num_steps=1, probe_in_budget=True)  # something is trained, though the probe fills the round


@pytest.mark.parametrize("scope", ["backward", "train"])
@pytest.mark.parametrize("dp", ["exact", "official"])
def test_no_step_is_over_budget_unless_it_says_so(scope, dp):
    history = run_rounds(FedEL(budget_scope=scope, dp=dp), 8, scope=scope)
    for report in history.reports:
        seconds = report.batches * report.cost.total(scope)
        fits = seconds <= fakes.WORK.num_steps * history.budget_seconds * (1 + 1e-6)
        assert fits is not report.over_budget
    assert not all(r.over_budget for r in history.reports)


def test_selected_tensors_lie_inside_the_window_and_nothing_else_moves():
    history = run_rounds(FedEL(), 8)
    spec = fakes.spec()
    for model, updates in zip(history.models, history.updates, strict=True):
        for update in updates:
            window = update.report.window
            for name in update.report.selected:
                assert spec.by_name[name].block in window
            for name, patch in update.patches.items():
                role = spec.by_name[name].role
                if role is Role.WEIGHT:
                    assert name in update.report.selected
                if role is Role.EXIT:
                    assert spec.by_name[name].block == window.front
                assert patch.values.shape == model[name].shape


def test_a_tensor_that_nobody_selected_keeps_its_bits():
    history = run_rounds(FedEL(), 3)
    models = [*history.models, history.model]
    for before, after, updates in zip(models, models[1:], history.updates, strict=False):
        sent = {name for update in updates for name in update.patches}
        for name in before:
            if name not in sent:
                assert before[name].tobytes() == after[name].tobytes()


def test_a_slow_client_covers_the_model_over_the_rounds_and_starts_again():
    slow = fleet()["client-3"]
    assert (
        4.0
        == full_step(slow.profile).backward_seconds / full_step(fleet()["client-0"].profile).backward_seconds
    )
    history = run_rounds(FedEL(), 12, {"fast": fleet()["client-0"], "slow": slow})
    windows = [u.report.window for updates in history.updates for u in updates if u.report.client == "slow"]
    covered = {b for w in windows for b in range(w.end, w.front + 1)}
    assert set(range(1, 7)) == covered
    assert history.memories["slow"].resets >= 1
    fast = {u.report.window for updates in history.updates for u in updates if u.report.client == "fast"}
    assert {Window(1, 6)} == fast


def test_the_window_stays_where_it_was_when_the_update_was_not_accepted():
    client = fleet()["client-3"]
    task = task_for(client, budget_seconds=full_step(client.profile).backward_seconds / 4)
    first, after_first = FedEL().fit(task, fakes.initial_model(), Memory(), client)
    again, _ = FedEL().fit(task, fakes.initial_model(), Memory(), client)
    second, _ = FedEL().fit(task, fakes.initial_model(), after_first, client)
    assert first.report.window == again.report.window
    assert second.report.window.front > first.report.window.front


def test_blocks_beyond_the_front_and_below_the_end_are_left_to_the_trainer_as_frozen():
    client = Recorder(**vars(fleet()["client-3"]))
    budget = full_step(client.profile).backward_seconds / 4
    memory = Memory()
    for _ in range(3):
        _, memory = FedEL().fit(task_for(client, budget_seconds=budget), fakes.initial_model(), memory, client)
        train_spec = client.asked[-1]
        assert (memory.window.front,) == train_spec.exits
        assert memory.window.end == train_spec.end


def test_beta_decides_between_the_local_and_the_global_view():
    client = fleet()["client-2"]
    window = Window(1, 6)
    names = [t.name for t in client.spec.weights_in(1, 6)]
    change = {name: 1.0 if name == names[0] else 0.0 for name in names}
    budget = window_cost(client.spec, client.profile, {names[0]}, window).backward_seconds * 1.001
    task = task_for(client, budget_seconds=budget, global_importance=change)

    class Deep(FakeTrainer):
        def probe(self, model, window, work, seed):
            return {n: -1.0 if n == names[-1] else -1e-9 for n in names}

    deep = Deep(**{**vars(client), "profile": client.profile})
    whole = Memory(Window(1, 6), ())
    # A window of the whole model whatever the budget, so that only importance decides.
    chosen = {}
    for beta in (0.0, 1.0):
        strategy = FedEL(beta=beta)
        object.__setattr__(strategy, "slide", lambda task, memory, trainer: whole)
        update, _ = strategy.fit(task, fakes.initial_model(), Memory(), deep)
        chosen[beta] = update.report.selected
    assert names[0] in chosen[0.0]
    assert names[-1] in chosen[1.0]
    assert names[0] not in chosen[1.0]


def test_fedel_c_windows_do_not_overlap():
    history = run_rounds(
        FedEL(variant="disjoint"), 8, {"fast": fleet()["client-0"], "slow": fleet()["client-3"]}
    )
    windows = [u.report.window for updates in history.updates for u in updates if u.report.client == "slow"]
    for before, after in itertools.pairwise(windows):
        assert after.end == (1 if before.front == 6 else before.front + 1)


def test_without_rollback_a_window_is_held_and_the_last_one_stays():
    clients = {"fast": fleet()["client-0"], "slow": fleet()["client-3"]}
    history = run_rounds(FedEL(variant="no-rollback", hold_rounds=3), 21, clients)
    windows = [u.report.window for updates in history.updates for u in updates if u.report.client == "slow"]
    fronts = [w.front for w in windows]
    assert fronts[0] == fronts[1] == fronts[2] < fronts[3]
    assert sorted(fronts) == fronts
    assert 6 == fronts[-1]
    assert 0 == history.memories["slow"].resets


def test_a_budget_too_small_for_anything_trains_the_exit_and_says_so():
    client = fleet()["client-3"]
    task = task_for(client, budget_seconds=1e-6)
    update, memory = FedEL().fit(task, fakes.initial_model(), Memory(), client)
    assert update.report.over_budget
    assert () == update.report.selected
    assert {Role.EXIT, Role.BUFFER} >= {client.spec.by_name[n].role for n in update.patches}
    assert Window(1, 1) == memory.window
    further, _ = FedEL().fit(task, fakes.initial_model(), memory, client)
    assert 2 == further.report.window.front


def test_where_the_forward_pass_alone_fills_the_budget_the_front_block_is_trained_all_the_same():
    client = fleet()["client-3"]
    task = task_for(client, budget_seconds=1e-6)
    update, _ = FedEL(budget_scope="train").fit(task, fakes.initial_model(), Memory(), client)
    assert update.report.over_budget
    assert ("blocks.stem.conv.weight", "blocks.stem.conv.bias") == update.report.selected


def test_where_the_forward_pass_counts_a_window_stays_within_the_budget():
    client = fleet()["client-0"]
    both = [f + b for f, b in zip((2e-3, 4e-3, 6e-3), block_seconds(client.profile), strict=False)]
    task = task_for(client, budget_seconds=sum(both) + client.profile.overhead_seconds - 1e-6)
    just_above, _ = FedEL().fit(task, fakes.initial_model(), Memory(), client)
    within, _ = FedEL(budget_scope="train").fit(task, fakes.initial_model(), Memory(), client)
    assert Window(1, 2) == within.report.window
    assert just_above.report.window.front >= 3


def test_where_importance_favours_nothing_the_cheapest_tensor_at_the_front_is_trained():
    client = fleet()["client-0"]
    useless = {t.name: -1.0 for t in client.spec.weights}
    choice = choose(Prices(client.spec, client.profile, "backward", 1e9, 4, 8), Window(1, 3), useless)
    assert Choice(frozenset({"blocks.three.conv.bias"}), 4, in_budget=True) == choice


def test_heads_on_a_frozen_trunk_train_window_by_window_each_through_its_own_exit():
    spec = fakes.frozen_spec()
    clients = {"fast": fleet(1, spec)["client-0"], "slow": replace(fleet(4, spec)["client-3"])}
    history = run_rounds(FedEL(), 8, clients)
    for updates in history.updates:
        for update in updates:
            assert not any(spec.by_name[n].role is Role.FROZEN for n in update.patches)
            window = update.report.window
            assert {spec.by_name[n].block for n in update.report.selected} <= set(
                range(window.end, window.front + 1)
            )
            assert update.report.cost.backward_seconds <= history.budget_seconds * (1 + 1e-6)


def test_elastictrainer_always_runs_the_whole_network_within_the_budget():
    history = run_rounds(ElasticTrainer(), 5)
    for report in history.reports:
        assert Window(1, 6) == report.window
        assert report.cost.backward_seconds <= history.budget_seconds * (1 + 1e-6)


@pytest.mark.parametrize("kind", [FedEL, ElasticTrainer])
def test_a_device_that_fits_trains_everything_without_a_probe_if_told_so(kind):
    history = run_rounds(kind(train_all_that_fits=True), 1)
    fast, slow = history.reports[0], history.reports[3]
    assert {t.name for t in fakes.spec().weights} == set(fast.selected)
    assert fast.probe == FREE != slow.probe


def test_elastictrainer_with_time_for_everything_is_fedavg_with_equal_weights():
    clients = helpful_fleet()
    mine = run_rounds(ElasticTrainer(), 3, clients, budget_seconds=1e9)
    theirs = run_rounds(FedAvg(weighting="uniform"), 3, clients, budget_seconds=1e9)
    assert same_bits(theirs.model, mine.model)


def test_the_order_of_arrival_does_not_matter():
    for strategy in (FedEL(), ElasticTrainer(), FedEL(weighting="samples")):
        assert same_bits(run_rounds(strategy, 3).model, run_rounds(strategy, 3, backwards=True).model)


def test_participants_are_the_same_for_every_method_and_differ_by_round():
    clients = fleet(12)
    drawn = {}
    for strategy in (FedAvg(), FedEL(), ElasticTrainer()):
        history = run_rounds(strategy, 4, clients, num_participants=3)
        drawn[strategy.name] = [[t.client for t in plan.tasks] for plan in history.plans]
    assert drawn["fedavg"] == drawn["fedel"] == drawn["elastictrainer"]
    assert all(3 == len(names) for names in drawn["fedel"])
    assert len({tuple(names) for names in drawn["fedel"]}) > 1


def test_a_task_carries_the_budget_the_work_and_a_seed_of_its_own():
    context = context_of(fleet(2), round_num=3)
    tasks = [base.task_for(context, client, {"width": 0.5}, num_steps=9) for client in context.clients]
    assert {context.budget_seconds} == {t.budget_seconds for t in tasks}
    assert {9} == {t.work.num_steps for t in tasks}
    assert tasks[0].seed != tasks[1].seed
    assert {"width": 0.5} == tasks[0].settings


@pytest.mark.parametrize(
    "options",
    [{"beta": 1.5}, {"variant": "rolling"}, {"dp": "greedy"}, {"budget_scope": "all"}, {"hold_rounds": 0}],
)
def test_bad_options_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FedEL(**options)


def test_global_importance_reaches_the_selection():
    one = run_rounds(FedEL(beta=0.0), 4)
    other = run_rounds(FedEL(beta=1.0), 4)
    assert not same_bits(one.model, other.model)
    assert all(np.isfinite(values).all() for values in one.model.values())


def test_windows_within_the_budget_train_every_block_without_a_probe():
    history = run_rounds(FedEL(window_within=True), 24, fleet(4))
    slow = [report for report in history.reports if report.client == "client-3"]
    budget = history.budget_seconds
    for report in slow:
        fitting = report.window.end < report.window.front
        blocks = fakes.spec().weights_in(report.window.end, report.window.front)
        if report.probe == FREE:
            assert {t.name for t in blocks} == set(report.selected)
            assert report.cost.backward_seconds <= budget * (1 + 1e-9)
        assert report.probe == FREE or not fitting
    ends = [report.window.end for report in slow]
    fronts = [report.window.front for report in slow]
    assert all(end in (1, front + 1) for end, front in zip(ends[1:], fronts, strict=False))
    assert set(ends) | set(fronts) >= {1, fakes.spec().num_blocks}


def test_the_paper_leaves_the_first_block_out_where_windows_within_do_not():
    def trained_first(strategy):
        reports = run_rounds(strategy, 24, helpful_fleet(4)).reports
        first = fakes.spec().weights[0].name
        return sum(first in report.selected for report in reports if report.client == "client-3")

    assert trained_first(FedEL(window_within=True)) >= trained_first(FedEL())


def test_windows_that_start_spread_are_not_in_step_and_do_not_change_from_run_to_run():
    alike = {f"client-{i}": FakeTrainer(i, 20, fakes.profile(4)) for i in range(12)}
    budget = full_step(fakes.profile(1)).backward_seconds
    first, again = (
        run_rounds(FedEL(start="spread"), 2, alike, budget_seconds=budget).reports for _ in range(2)
    )
    windows = [report.window for report in first]
    assert len(set(windows[:12])) > 1
    assert windows == [report.window for report in again]
    assert {Window(1, 2)} != set(windows[:12])
    together = run_rounds(FedEL(), 1, alike, budget_seconds=budget).reports
    assert len({report.window for report in together}) == 1
    other = run_rounds(FedEL(start="spread"), 1, alike, budget_seconds=budget, seed=9).reports
    assert [report.window for report in other] != windows[:12]


def test_windows_within_have_one_variant():
    with pytest.raises(ValueError, match="window_within goes with"):
        FedEL(window_within=True, variant="disjoint")
    with pytest.raises(ValueError, match="start = 'middle'"):
        FedEL(start="middle")
