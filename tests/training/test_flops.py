"""The counted profile: multiplications by hand, and that it is the same on every machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedel.core.timing import block_seconds, full_step
from fedel.errors import ProfileError
from fedel.models import registry
from fedel.models.custom import as_model
from fedel.training.flops import SECONDS, flops_profile
from fedel.training.profile_io import check_profile

NORMED = {"width": 0.5, "batch_norm": True}


def test_a_convolution_costs_its_multiplications_each_way() -> None:
    model = registry.build("cnn", **NORMED)
    profile = flops_profile(model, torch.zeros(2, 1, 14, 14), batch_size=16)
    check_profile(profile, model.spec)
    times = profile.by_name
    kernel = 16 * 14 * 14 * 8 * (1 * 3 * 3) * SECONDS  # batch, places, channels out, channels in times 3 x 3
    first, second = times["blocks.conv1_1.conv.weight"], times["blocks.conv1_2.conv.weight"]
    assert (first.grad_seconds, first.update_seconds) == pytest.approx((kernel, kernel))
    assert second.update_seconds == pytest.approx(8 * kernel)
    values = 16 * 14 * 14 * 8 * SECONDS
    shift, scale, bias = (times[f"blocks.conv1_1.{name}"] for name in ("bn.bias", "bn.weight", "conv.bias"))
    assert (shift.grad_seconds, scale.grad_seconds, bias.grad_seconds) == pytest.approx((values, 0, 0))
    assert profile.blocks[0].forward_seconds == pytest.approx(kernel + values)
    head = 16 * (8 * 5 * 5) * 10 * SECONDS  # batch, averages over a grid of 5 x 5, classes
    assert profile.blocks[0].exit_forward_seconds == pytest.approx(head)
    assert profile.blocks[0].exit_backward_seconds == pytest.approx(2 * head)


def test_the_backward_pass_takes_twice_the_forward_pass() -> None:
    profile = flops_profile(registry.build("vgg16", num_classes=10, width=0.1), torch.zeros(1, 3, 32, 32), 4)
    cost = full_step(profile)
    assert 1.9 < cost.backward_seconds / cost.forward_seconds < 2.01
    assert sum(block_seconds(profile)) == pytest.approx(cost.backward_seconds)


def test_narrow_models_are_counted_not_squared() -> None:
    """The first layer's inputs and the last one's outputs are never cut."""
    profile = flops_profile(registry.build("cnn", **NORMED), torch.zeros(2, 1, 14, 14), 16, widths=(0.5,))
    (half,) = profile.widths
    assert 0.25 < half.backward_seconds / full_step(profile).backward_seconds < 0.3


@pytest.mark.parametrize("mode", ["unshared", "frozen"])
def test_attention_is_paid_on_the_way_through(mode: str) -> None:
    sizes = {"hidden_size": 16, "embedding_size": 8, "num_layers": 2, "num_heads": 2, "ffn_size": 32}
    model = registry.build("albert", mode=mode, vocab_size=50, bottleneck=8, max_length=16, **sizes)
    profile = flops_profile(model, torch.zeros(2, 16, dtype=torch.long), batch_size=2)
    check_profile(profile, model.spec)
    assert all(t.grad_seconds >= 0 for t in profile.tensors)
    attention = 2 * 2 * 16 * 16 * 16 * SECONDS  # of two products, for 2 samples of 16 tokens and 16 features
    kernels = sum(t.update_seconds for t in profile.tensors if t.block == 2 and t.name.endswith("weight"))
    if mode == "unshared":
        through = sum(t.grad_seconds for t in profile.tensors if t.block == 2)
        assert through > kernels * 0.9 + 2 * attention * 0.99


class Heard(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        heard: Tensor = self.lstm(x)[0]
        return heard[:, -1]


def test_a_layer_that_cannot_be_counted_is_named() -> None:
    model = as_model(nn.Sequential(Heard(), nn.Linear(8, 4)), "own", torch.zeros(2, 7, 5))
    said = r"cannot count LSTM '\S+\.lstm', which holds the tensor '\S+weight_ih_l0'.*set base to 'measured'"
    with pytest.raises(ProfileError, match=said):
        flops_profile(model, torch.zeros(2, 7, 5), batch_size=4)
