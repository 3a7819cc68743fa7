"""FIARSE: the threshold over the whole model, what is maskable, what counts in the mean, two clocks."""

from __future__ import annotations

import numpy as np
import pytest

from fedel.core.sparsity import gradient_factor, magnitude_threshold, maskable
from fedel.core.timing import full_step
from fedel.strategies.fedavg import FedAvg
from fedel.strategies.fiarse import FIARSE
from fedel.types import Memory, ModelSpec, Patch, Role, TensorSpec
from tests.simulation.history import run_rounds
from tests.strategies.fakes import Recorder, context_of, fleet, frozen_spec, initial_model, profile, spec

NORM = ("blocks.norm.bn.weight", "blocks.norm.bn.bias")


def test_gradient_factor() -> None:
    factor = gradient_factor(np.array([1.0, -3.0, 0.999, 0.0]), 1.0)
    assert factor.tolist() == [1.5, 1.375, 0.0, 0.0]
    assert gradient_factor(np.array([0.0, 2.0]), 0.0).tolist() == [1.0, 1.0]


def test_everything_but_normalisation_is_maskable() -> None:
    assert set(maskable(spec())) == {t.name for t in spec().weights} - set(NORM)
    assert set(maskable(frozen_spec())) == {t.name for t in frozen_spec().weights}


def test_layer_norms_are_recognised_whatever_their_shape() -> None:
    shapes = {
        "ln.weight": (8,),
        "ln.bias": (8,),
        "wide.weight": (4, 8),
        "wide.bias": (4, 8),
        "plain.weight": (8,),
        "linear.weight": (8, 8),
        "linear.bias": (8,),
        "unbiased.weight": (8, 8),
    }
    made = ModelSpec("toy", ("b",), tuple(TensorSpec(n, 1, s) for n, s in shapes.items()))
    assert maskable(made) == ("linear.weight", "linear.bias", "unbiased.weight")


def test_threshold_is_one_for_all_tensors_and_truncates() -> None:
    model = {"a": np.array([9.0, -8.0, 7.0]), "b": np.array([1.0, -2.0, 0.5, 0.1])}
    # int(0.6 * 7) = 4: the fourth largest of 9 8 7 2 1 .5 .1
    assert magnitude_threshold(model, model, 0.6) == 2.0
    assert magnitude_threshold(model, model, 1.0) == 0.1
    assert magnitude_threshold(model, model, 1e-6) == 9.0


def test_gamma_is_the_share_of_the_model_the_budget_pays_for() -> None:
    plan = FIARSE().plan(context_of({f"c{s}": Recorder(s, 20, profile(s)) for s in (1, 2, 3, 4)}))
    assert [task.settings["gamma"] for task in plan.tasks] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def fit_one(slowness: float) -> tuple[Recorder, dict[str, Patch], dict[str, np.ndarray]]:
    client, model, strategy = Recorder(1, 20, profile(slowness)), initial_model(), FIARSE()
    budget = full_step(profile()).total("backward")
    task = strategy.plan(context_of({"a": client}, budget_seconds=budget)).tasks[0]
    update, _ = strategy.fit(task, model, Memory(), client)
    return client, dict(update.patches), model


def test_whole_model_has_the_least_magnitude_as_threshold() -> None:
    client, _, model = fit_one(1)
    assert client.asked[0].hooks[0].threshold == min(np.abs(model[name]).min() for name in maskable(spec()))


def test_only_values_that_moved_are_sent() -> None:
    client, patches, model = fit_one(4)
    theta = client.asked[0].hooks[0].threshold
    assert theta is not None
    sizes = np.concatenate([np.abs(model[name]).ravel() for name in maskable(spec())])
    assert (sizes >= theta).sum() == int(sizes.size / 4)
    for name in maskable(spec()):
        large = np.abs(model[name]) >= theta
        if not large.any():
            assert name not in patches
        elif not large.all():
            np.testing.assert_array_equal(patches[name].where, large)
            assert patches[name].values.shape == (large.sum(),)
    assert [patches[name].where for name in NORM] == [None, None]
    assert [patches[t.name].where for t in spec().tensors if t.role is Role.BUFFER] == [None, None]


def test_values_below_every_threshold_keep_their_bits() -> None:
    history = run_rounds(FIARSE(), 1, {"a": Recorder(1, 20, profile())}, budget_seconds=0.05)
    moved = sum(int((history.model[name] != history.models[0][name]).sum()) for name in maskable(spec()))
    total = sum(spec().by_name[name].size for name in maskable(spec()))
    assert moved == int(history.plans[0].tasks[0].settings["gamma"] * total)


@pytest.mark.parametrize("of", [spec(), frozen_spec()], ids=lambda of: of.name)
def test_two_clocks(of: ModelSpec) -> None:
    clients = fleet(4, of)
    honest = run_rounds(FIARSE(), 1, clients)
    optimistic = run_rounds(FIARSE(clock="optimistic"), 1, clients)
    full = run_rounds(FedAvg(), 1, clients)
    assert [r.cost for r in honest.reports] == [r.cost for r in full.reports]
    for task, fast, dense in zip(optimistic.plans[0].tasks, optimistic.reports, honest.reports, strict=True):
        assert fast.cost.total("train") == pytest.approx(task.settings["gamma"] * dense.cost.total("train"))
        assert fast.cost.total("backward") <= optimistic.budget_seconds * (1 + 1e-9)
        assert not fast.over_budget
        assert dense.over_budget == (task.settings["gamma"] < 1)


def test_bad_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="clock = 'sundial' is not one of: honest, optimistic"):
        FIARSE(clock="sundial")


def test_statistics_are_those_of_the_model_that_is_tested_and_are_paid_for() -> None:
    client = Recorder(1, 20, profile(2))
    strategy = FIARSE()
    task = strategy.plan(
        context_of({"a": client}, budget_seconds=full_step(profile()).total("backward"))
    ).tasks[0]
    report = strategy.fit(task, initial_model(), Memory(), client)[0].report
    assert client.asked[0].static_norm
    batches = 20 // task.work.batch_size
    assert report.probe.total("train") == pytest.approx(min(8, batches) * full_step(profile(2)).forward_seconds)
    assert report.probe.total("backward") == 0
