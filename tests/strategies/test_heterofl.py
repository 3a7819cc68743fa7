"""HeteroFL: widths from the budget, sub-models in the fold, classifier rows of the client's own classes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedel.core.timing import width_step
from fedel.strategies.fedavg import FedAvg
from fedel.strategies.heterofl import HeteroFL, OwnClasses, Scaler
from fedel.types import Memory, Patch, WidthTime
from tests.simulation.history import run_rounds
from tests.strategies.fakes import (
    Recorder,
    context_of,
    fleet,
    frozen_spec,
    initial_model,
    profile,
    same_bits,
    spec,
)

PLAIN = HeteroFL(widths=(1.0,), scaler=False, static_norm=False, masked_loss=False)


@pytest.mark.parametrize(("slowness", "width"), [(1, 1.0), (2, 0.7), (3, 0.5), (4, 0.5)])
def test_width_is_the_largest_on_the_grid_that_fits(slowness: float, width: float) -> None:
    budget = width_step(profile(), 1.0).total("backward")
    assert HeteroFL().width_for(profile(slowness), budget) == width


def test_width_follows_measured_times_rather_than_the_square() -> None:
    full = width_step(profile(4), 1.0)
    slow = WidthTime(0.5, full.forward_seconds * 0.5, full.backward_seconds * 0.5)
    measured = replace(profile(4), widths=(slow,))
    assert HeteroFL().width_for(measured, full.backward_seconds / 4) == 0.2


def test_forward_counts_in_scope_train() -> None:
    one = profile()
    heavy = replace(one, blocks=tuple(replace(b, forward_seconds=b.forward_seconds * 100) for b in one.blocks))
    budget = width_step(heavy, 1.0).backward_seconds
    assert HeteroFL().width_for(heavy, budget) == 1.0
    assert HeteroFL(budget_scope="train").width_for(heavy, budget) < 1.0


def test_nothing_fits_takes_the_smallest_width_and_says_so() -> None:
    history = run_rounds(HeteroFL(), 1, budget_seconds=1e-9)
    assert {task.settings["width"] for task in history.plans[0].tasks} == {0.1}
    assert all(report.over_budget for report in history.reports)


def test_job_carries_every_option() -> None:
    client = Recorder(1, 20, profile(4), (0, 2))
    strategy = HeteroFL(clip_norm=1.5)
    task = strategy.plan(context_of({"a": client}, budget_seconds=0.05)).tasks[0]
    strategy.fit(task, initial_model(), Memory(), client)
    (train_spec,) = client.asked
    width = task.settings["width"]
    assert (train_spec.width, train_spec.static_norm) == (width, True)
    assert train_spec.hooks == (Scaler(width), OwnClasses(client.classes))
    assert train_spec.work.clip_norm == 1.5
    assert train_spec.selected == {t.name for t in spec().weights}


def test_classifier_counts_only_in_rows_of_own_classes() -> None:
    strategy, model = HeteroFL(), initial_model()
    clients = {"a": Recorder(1, 20, profile(4), (0, 2)), "b": Recorder(2, 20, profile(1), (2, 3))}
    context = context_of(clients)
    fold = strategy.fold(spec())
    sent: dict[str, dict[str, Patch]] = {}
    for task in strategy.plan(context).tasks:
        update, _ = strategy.fit(task, model, Memory(), clients[task.client])
        sent[task.client] = dict(update.patches)
        fold.add(update)
    bias = fold.finish(model, {}).model["blocks.classifier.linear.bias"]
    a, b = (sent[name]["blocks.classifier.linear.bias"].values for name in ("a", "b"))
    expected = model["blocks.classifier.linear.bias"].copy()
    expected[[0, 2, 3]] = a[0], (a[1] + b[0]) / 2, b[1]
    np.testing.assert_allclose(bias, expected, rtol=1e-6)
    assert bias[[1, 4]].tobytes() == model["blocks.classifier.linear.bias"][[1, 4]].tobytes()
    narrow = sent["a"]["blocks.classifier.linear.weight"]
    assert narrow.values.shape == model["blocks.classifier.linear.weight"][narrow.where].shape == (2, 4)


def test_values_outside_every_sub_model_keep_their_bits() -> None:
    clients = {"a": Recorder(1, 20, profile(4))}
    history = run_rounds(HeteroFL(widths=(0.5,)), 1, clients)
    before, after = history.models[0]["blocks.four.conv.weight"], history.model["blocks.four.conv.weight"]
    assert after[4:].tobytes() == before[4:].tobytes()
    assert after[:, 3:].tobytes() == before[:, 3:].tobytes()
    assert (after[:4, :3] != before[:4, :3]).all()


@pytest.mark.parametrize("of", [spec(), frozen_spec()], ids=lambda of: of.name)
def test_full_width_without_extras_is_fedavg(of: object) -> None:
    clients = fleet(of=of)  # type: ignore[arg-type]
    plain = replace(PLAIN, weighting="samples")
    assert same_bits(run_rounds(plain, 3, clients).model, run_rounds(FedAvg(), 3, clients).model)


def test_every_step_keeps_the_budget() -> None:
    history = run_rounds(HeteroFL())
    limit = history.budget_seconds * (1 + 1e-9)
    assert [report.cost.total("backward") <= limit for report in history.reports] == [True] * 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widths": ()}, "widths"),
        ({"widths": (0.5, 0.0)}, "each above 0 and up to 1"),
        ({"clip_norm": -1.0}, "clip_norm = -1"),
        ({"budget_scope": "both"}, "not one of: backward, train"),
        ({"weighting": "size"}, "not one of: uniform, samples"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeteroFL(**options)  # type: ignore[arg-type]
