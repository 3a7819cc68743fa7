"""Exits that teach each other inside a window: which train, what it costs, what they learn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedel.core.timing import full_step, step_cost
from fedel.strategies import FedEL
from fedel.strategies.teaching import Teaching, lessons
from fedel.types import Memory, Role
from tests.strategies.fakes import Recorder, context_of, initial_model, profile, spec


def fit(strategy: FedEL, slowness: float = 2) -> tuple[Recorder, object]:
    client = Recorder(1, 20, profile(slowness))
    budget = full_step(profile()).total("backward")
    task = strategy.plan(context_of({"a": client}, budget_seconds=budget)).tasks[0]
    needed = strategy.tensors_needed(task, Memory(), client)
    assert needed is not None
    model = {name: values for name, values in initial_model().items() if name in needed}
    return client, strategy.fit(task, model, Memory(), client)[0]


def test_every_exit_of_the_window_trains_and_is_paid_for() -> None:
    client, update = fit(FedEL(teach=0.5))
    window = update.report.window  # type: ignore[attr-defined]
    (train_spec,) = client.asked
    assert train_spec.exits == tuple(range(window.end, window.front + 1))
    assert len(train_spec.exits) > 1
    assert Teaching(0.5) in train_spec.hooks
    trained = {spec().by_name[name].block for name in update.patches if spec().by_name[name].role is Role.EXIT}  # type: ignore[attr-defined]
    assert trained == {block for block in train_spec.exits if block < spec().num_blocks}
    cost = step_cost(profile(2), train_spec.selected, train_spec.exits, window.end)
    assert update.report.cost == cost  # type: ignore[attr-defined]
    alone = step_cost(profile(2), train_spec.selected, (window.front,), window.end)
    assert cost.total("backward") > alone.total("backward")


def test_without_it_the_front_trains_alone() -> None:
    client, _ = fit(FedEL())
    (train_spec,) = client.asked
    assert (len(train_spec.exits), train_spec.hooks) == (1, ())
    with pytest.raises(ValueError, match="teach = -1"):
        FedEL(teach=-1)


def test_an_exit_learns_from_the_mean_of_the_others() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = [torch.randn(4, 5, generator=generator, requires_grad=True) for _ in range(3)]
    lessons(logits).backward()
    with torch.no_grad():
        # The gradient of a divergence: what it says less what the teacher says, over the batch and the exits.
        teacher = ((logits[1] + logits[2]) / 2).softmax(-1)
        expected = (logits[0].softmax(-1) - teacher) / (4 * 3)
    np.testing.assert_allclose(logits[0].grad, expected, atol=1e-6)
    alike = [torch.ones(2, 3)] * 2
    assert lessons(alike) == pytest.approx(0.0)


def test_one_exit_has_nobody_to_learn_from() -> None:
    assert Teaching(0.5).loss(None, 1.25, [torch.ones(2, 3)], None) == 1.25  # type: ignore[arg-type]
