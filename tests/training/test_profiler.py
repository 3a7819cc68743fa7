"""The profiler: complete, not negative, leaving no trace; benchmarks/elastic_step.py measures its accuracy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedel.core.timing import full_step
from fedel.models.blocks import BlockModel
from fedel.training.elastic import BiasGradient
from fedel.training.graph import record_spans, timed_backward
from fedel.training.profiler import profile
from fedel.types import LocalWork, TimingProfile

from .toys import conv_block, head, make_model

CPU = torch.device("cpu")


def noise(num_samples: int = 16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((num_samples, 1, 8, 8)).astype(np.float32), rng.integers(0, 4, num_samples)


@pytest.fixture(scope="module")
def measured() -> TimingProfile:
    return profile(make_model(norm=True), noise(), LocalWork(), widths=(0.5,), rounds=3)


def test_every_weight_and_block_is_measured_in_forward_order(measured: TimingProfile) -> None:
    spec = make_model(norm=True).spec
    assert [(t.name, t.block) for t in measured.tensors] == [(t.name, t.block) for t in spec.weights]
    assert len(measured.blocks) == spec.num_blocks
    assert [w.width for w in measured.widths] == [0.5]
    assert measured.batch_size == 16


def test_a_measurement_remembers_the_size_of_the_exits_it_was_made_with(measured: TimingProfile) -> None:
    spec = make_model().spec
    assert measured.exit_sizes == spec.exit_sizes
    assert min(spec.exit_sizes[:-1]) > 0
    assert spec.exit_sizes[-1] == 0


def test_times_are_not_negative_and_work_takes_time(measured: TimingProfile) -> None:
    assert all(t.grad_seconds >= 0 and t.update_seconds >= 0 for t in measured.tensors)
    assert all(b.forward_seconds > 0 and b.frozen_forward_seconds > 0 for b in measured.blocks)
    assert all(b.exit_forward_seconds > 0 and b.exit_backward_seconds > 0 for b in measured.blocks[:-1])
    assert measured.blocks[-1].exit_forward_seconds == 0
    assert measured.overhead_seconds > 0
    assert measured.widths[0].backward_seconds > 0


def test_a_norm_carries_the_way_through_on_its_shift(measured: TimingProfile) -> None:
    times = measured.by_name
    assert times["blocks.two.bn.weight"].grad_seconds == 0
    assert times["blocks.two.bn.bias"].grad_seconds > 0
    assert times["blocks.two.conv.weight"].grad_seconds > 0


def test_parts_add_up_to_the_whole_step_by_calibration(measured: TimingProfile) -> None:
    cost = full_step(measured)
    assert cost.backward_seconds > 0
    assert 0.2 < measured.calibration < 5


def test_profiling_leaves_the_model_as_it_was() -> None:
    model = make_model(norm=True)
    before = model.tensors()
    profile(model, noise(), LocalWork(), rounds=1)
    assert all(np.array_equal(before[name], values) for name, values in model.tensors().items())
    assert not any(p.requires_grad for p in model.parameters())


def test_exits_on_a_frozen_trunk_are_profiled_as_chains_of_their_own() -> None:
    blocks = {name: conv_block(c, 4, False) for name, c in (("one", 1), ("two", 4))}
    trunk = BlockModel(
        "trunk",
        blocks,
        {name: head(4) for name in blocks},
        num_classes=4,
        exit_each=True,
        frozen=[f"blocks.{name}" for name in blocks],
    )
    measured = profile(trunk, noise(), LocalWork(optimiser="adamw"), rounds=1)
    assert [t.name for t in measured.tensors] == [t.name for t in trunk.spec.weights]
    assert all(b.exit_forward_seconds > 0 and b.exit_backward_seconds > 0 for b in measured.blocks)


def test_progress_and_fetching_are_reported() -> None:
    seen: list[tuple[int, int]] = []
    fetched: list[int] = []
    profile(
        make_model(),
        noise(4),
        LocalWork(),
        rounds=2,
        fetch=lambda: fetched.append(1),
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 2), (1, 2), (2, 2)]
    assert len(fetched) == 3


def test_node_times_are_charged_to_the_layer_that_made_them_or_came_before() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    with record_spans([first, second]) as spans:
        y = (second(first(x.exp()).relu()) * 2).tanh()
    seconds = timed_backward(y, torch.ones_like(y), spans, CPU)
    assert set(seconds) == {(1, False), (1, True), (0, False), (0, True), (-1, False)}
    assert all(value >= 0 for value in seconds.values())


@pytest.mark.parametrize("shape", [(5, 3, 4, 4), (5, 3, 7), (5, 3, 2, 3, 4)])
def test_bias_gradient_sums_over_all_but_the_channel(shape: tuple[int, ...]) -> None:
    y, bias = torch.randn(shape), torch.zeros(3, requires_grad=True)
    weights = torch.randn(shape)
    (BiasGradient.apply(y, bias).relu_() * weights).sum().backward()
    expected = (weights * (y > 0)).movedim(1, 0).flatten(1).sum(1)
    torch.testing.assert_close(bias.grad, expected)
