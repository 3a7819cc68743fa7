"""Frozen work costs nothing: seen in the autograd graph itself."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fedel.errors import ModelError
from fedel.models.blocks import BlockModel
from fedel.training.elastic import elastic
from fedel.training.graph import _nodes


def operations(model: BlockModel, selected: set[str], front: int, end: int = 1) -> Counter[str]:
    """Backward operations of a step."""
    with elastic(model, selected, (front,), end) as net:
        (logits,) = net.logits(torch.zeros(2, 1, 8, 8))
        return Counter(node.name() for _, node in _nodes(logits))


def test_a_bias_alone_takes_no_convolution_backward_of_its_own_layer(plain: BlockModel) -> None:
    with_kernel = operations(plain, {"blocks.one.conv.weight", "blocks.one.conv.bias"}, front=2)
    alone = operations(plain, {"blocks.one.conv.bias"}, front=2)
    assert with_kernel["ConvolutionBackward0"] == 2
    assert alone["ConvolutionBackward0"] == 1
    assert alone["BiasGradientBackward"] == 1


def test_backward_ends_at_the_shallowest_selected_tensor(plain: BlockModel) -> None:
    found = operations(plain, {"blocks.three.conv.weight"}, front=3)
    assert found["ConvolutionBackward0"] == 1
    assert found["ReluBackward0"] == 1


def test_an_exit_trained_alone_goes_no_deeper(plain: BlockModel) -> None:
    found = operations(plain, set(), front=3)
    assert "ConvolutionBackward0" not in found
    assert found["AddmmBackward0"] == 1


def test_the_model_is_left_without_gradients_hooks_or_training_mode(normed: BlockModel) -> None:
    with elastic(normed, {"blocks.two.conv.bias"}, (3,), 2, track_statistics=False) as net:
        net.logits(torch.randn(2, 1, 8, 8))[0].sum().backward()
    assert not any(p.requires_grad or p.grad is not None for p in normed.parameters())
    assert not any(m.training or m._forward_hooks for m in normed.modules())
    assert normed.blocks["two"].bn.track_running_stats


@pytest.mark.parametrize(("exits", "end"), [((), 1), ((2,), 3), ((5,), 1), ((2,), 0)])
def test_a_job_that_makes_no_sense_is_refused(plain: BlockModel, exits: tuple[int, ...], end: int) -> None:
    with pytest.raises(ModelError, match=f"from block {end}"), elastic(plain, (), exits, end):
        pass


def test_detached_exits_learn_and_leave_the_blocks_alone(plain: BlockModel) -> None:
    blocks = {t.name for t in plain.spec.weights_in(1, 3)}
    found: dict[tuple[tuple[int, ...], bool], dict[str, torch.Tensor]] = {}
    for exits, detached in (((3,), False), ((2, 3), True), ((2, 3), False)):
        with elastic(plain, blocks, exits, detached=detached) as net:
            sum(z.square().sum() for z in net.logits(torch.ones(2, 1, 8, 8))).backward()  # type: ignore[union-attr]
            found[exits, detached] = {n: p.grad.clone() for n, p in net.trained.items() if p.grad is not None}
    alone, detached, together = found.values()
    assert all(torch.equal(alone[name], detached[name]) for name in blocks)
    assert not torch.equal(alone["blocks.one.conv.weight"], together["blocks.one.conv.weight"])
    inner = {name for name in detached if name.startswith("exits.two.")}
    assert inner
    assert all(detached[name].any() for name in inner)
