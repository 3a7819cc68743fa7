"""Exits inside a window that answer together or teach each other: which train, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedel.core.timing import full_step, step_cost
from fedel.strategies import FedEL
from fedel.strategies.inner_exits import Teaching, lessons
from fedel.types import Memory, Role, Window
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


def test_the_exits_that_answer_are_the_deeper_ones() -> None:
    assert [FedEL(answer=share).exits_to_average(spec()) for share in (0, 0.1, 0.5, 1)] == [
        (),
        (),
        (4, 5, 6),
        (1, 2, 3, 4, 5, 6),
    ]
    with pytest.raises(ValueError, match=r"answer = 1\.5"):
        FedEL(answer=1.5)


def test_exits_that_answer_train_inside_the_window_without_changing_its_blocks() -> None:
    client, update = fit(FedEL(answer=0.5, window_within=True), slowness=1)
    (train_spec,) = client.asked
    assert (4, 5, 6) == train_spec.exits
    assert train_spec.detached
    assert (spec().by_name.keys() - update.patches.keys()) == {  # type: ignore[attr-defined]
        t.name for t in spec().tensors if t.role is Role.EXIT and t.block < 4
    }
    client, _ = fit(FedEL(answer=0.5, teach=0.5), slowness=1)
    assert not client.asked[0].detached


@pytest.mark.parametrize("scope", ["backward", "train"])
def test_their_time_is_paid_with_steps_and_the_fastest_device_trains_the_whole_network(scope: str) -> None:
    client = Recorder(1, 20, profile(1))
    context = context_of({"a": client}, budget_seconds=full_step(profile()).total(scope))
    strategy = FedEL(answer=0.5, window_within=True, budget_scope=scope)
    task = strategy.plan(context).tasks[0]
    update, _ = strategy.fit(task, initial_model(), Memory(), client)
    steps = task.work.num_steps
    assert update.report.window == Window(1, 6)
    assert update.report.batches < steps
    spent = update.report.batches * update.report.cost.total(scope)
    assert 0.9 < spent / (steps * context.budget_seconds) <= 1 + 1e-6


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
