"""Narrowed models: the right channels, the right places, the same function."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedel.errors import ModelError
from fedel.models import BlockModel, as_block_model, build
from fedel.models.albert import albert
from fedel.models.narrow import cut, keep
from fedel.types import Where


def flattening_cnn() -> BlockModel:
    module = nn.Sequential(
        *(nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU()),
        *(nn.Conv2d(10, 10, 3, padding=1, groups=10), nn.ReLU()),
        *(nn.Conv2d(10, 7, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.BatchNorm1d(7 * 16)),
        *(nn.Linear(7 * 16, 20), nn.ReLU()),
        nn.Linear(20, 5),
    )
    return as_block_model(module, torch.randn(2, 3, 8, 8))


class NarrowsItself(nn.Module):
    """A convolution that FedEL knows nothing of."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(x, self.weight, padding=1).relu()

    def narrow_(self, width: float) -> dict[str, Where]:
        kept = slice(0, keep(self.weight.shape[0], width))
        return {"weight": cut(self, "weight", (kept, *3 * (slice(None),)))}


def self_narrowing_cnn() -> BlockModel:
    module = nn.Sequential(
        *(NarrowsItself(3, 7), nn.Conv2d(7, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(5, 4),
    )
    return as_block_model(module, torch.randn(2, 3, 8, 8))


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "vgg16": (lambda: build("vgg16", width=1 / 8), (3, 32, 32)),
    "vgg16 with batch norm": (lambda: build("vgg16", width=1 / 8, batch_norm=True), (3, 32, 32)),
    "vgg16 with hidden layers": (
        lambda: build("vgg16", width=1 / 8, hidden_layers=(512, 256), feature_size=2),
        (3, 64, 64),
    ),
    "resnet50": (lambda: build("resnet50", width=1 / 8), (1, 32, 32)),
    "own, flattening and depthwise": (flattening_cnn, (3, 8, 8)),
    "own, narrowing itself": (self_narrowing_cnn, (3, 8, 8)),
    "cnn, one average per channel": (
        lambda: build("cnn", width=0.5, exit_features=0),
        (1, 14, 14),
    ),
}


def part(full: np.ndarray, where: Where) -> np.ndarray:
    return full if where is None else full[where]


def stir(model: BlockModel) -> BlockModel:
    """Biases and statistics that show up in the output."""
    rng = np.random.default_rng(0)
    model.load({n: v + 0.05 * np.abs(rng.standard_normal(v.shape)) for n, v in model.tensors().items()})
    return model.eval()


def embedded(model: BlockModel, small: BlockModel, places: dict[str, Where]) -> BlockModel:
    """The full model with everything outside the narrow one set to zero."""
    values = {name: np.zeros_like(v) for name, v in model.tensors().items()}
    for name, v in small.tensors().items():
        values[name][... if places[name] is None else places[name]] = v
    full = copy.deepcopy(model)
    full.load(values)
    return full.eval()


@pytest.mark.parametrize("width", [0.5, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_narrow_model_is_the_full_one_with_its_other_channels_zero(case: str, width: float) -> None:
    torch.manual_seed(0)
    make, shape = CASES[case]
    model = stir(make())
    small, places = model.narrow(width)
    full = embedded(model, small, places)
    x = torch.randn(2, *shape)
    for mine, theirs in zip(small.eval().all_exits(x), full.all_exits(x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("width", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("case", CASES)
def test_places_point_at_the_values(case: str, width: float) -> None:
    model = CASES[case][0]()
    small, places = model.narrow(width)
    full, values = model.tensors(), small.tensors()
    assert list(places) == list(values) == list(full)
    for name, v in values.items():
        assert np.array_equal(part(full[name], places[name]), v)


@pytest.mark.parametrize("case", CASES)
def test_width_one_is_the_same_model(case: str) -> None:
    model = CASES[case][0]()
    same, places = model.narrow(1.0)
    assert model.spec == same.spec
    assert set(places.values()) == {None}


def test_channels_are_the_first_rounded_up_and_input_and_classes_stay() -> None:
    small, places = build("vgg16", width=1 / 8, num_classes=7).narrow(0.3)
    shapes = {t.name: t.shape for t in small.spec.tensors}
    assert shapes["blocks.conv1_1.conv.weight"] == (3, 3, 3, 3)
    assert shapes["blocks.conv5_3.conv.weight"] == (20, 20, 3, 3)
    assert shapes["blocks.classifier.linear.weight"] == (7, 20)
    assert shapes["exits.conv2_1.linear.weight"] == (7, 5 * 25)
    assert places["blocks.conv2_1.conv.weight"] == (slice(0, 5), slice(0, 3))
    assert places["blocks.classifier.linear.bias"] is None


def test_narrow_leaves_the_full_model_alone() -> None:
    model = build("cnn", width=0.5)
    before = model.tensors()
    small, _ = model.narrow(0.5)
    small.load({name: np.zeros_like(v) for name, v in small.tensors().items()})
    assert all(np.array_equal(before[name], v) for name, v in model.tensors().items())


def test_a_network_whose_first_layer_is_a_norm_keeps_its_input() -> None:
    module = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    small, _ = as_block_model(module, torch.randn(4, 6)).narrow(0.5)
    assert [t.shape for t in small.spec.weights] == [(6,), (6,), (4, 6), (4,), (3, 4), (3,)]


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_albert_narrows_the_heads_bottleneck_only(tied: bool) -> None:
    model = albert("frozen", None, 8, tied, 50, 8, 24, 4, 3, 40, 16)
    small, places = model.narrow(0.5)
    cut = {name.split(".", 2)[2] for name, where in places.items() if where is not None}
    assert cut == {"dense.weight", "dense.bias"} | (set() if tied else {"decoder.weight"})
    assert small.spec.by_name["exits.layer4.dense.weight"].shape == (4, 24)
    ids = torch.arange(6).reshape(1, 6)
    assert torch.equal(model.run(ids, 1, 4), small.run(ids, 1, 4))
    assert small(ids).shape == (1, 6, 50)


def test_unshared_albert_narrows_inside_each_head() -> None:
    model = albert("unshared", None, 6, False, 50, 8, 24, 4, 3, 40, 16)
    small, places = model.narrow(0.5)
    full, values = model.tensors(), small.tensors()
    for name, v in values.items():
        assert np.array_equal(part(full[name], places[name]), v)
    rows = places["blocks.layer2.layer.query.bias"]
    assert isinstance(rows, tuple)
    assert rows[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19]
    assert values["blocks.layer2.layer.out.weight"].shape == (12, 12)
    assert values["blocks.layer1.embeddings.word.weight"].shape == (50, 4)
    ids = torch.arange(6).reshape(1, 6)
    assert [logits.shape for logits in small.all_exits(ids)] == 4 * [(1, 6, 50)]


def test_a_narrow_model_trains() -> None:
    small, _ = build("cnn").narrow(0.4)
    small(torch.randn(4, 1, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in small.blocks.parameters())


@pytest.mark.parametrize("width", [0.0, -1.0, 1.5])
def test_width_outside_its_range_is_refused(width: float) -> None:
    with pytest.raises(ModelError, match=r"not in \(0, 1\]"):
        build("cnn").narrow(width)


def test_grouped_convolution_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Flatten(), nn.Linear(8, 2))
    model = as_block_model(module, torch.randn(2, 4, 1, 1))
    with pytest.raises(ModelError, match=r"'blocks\.block2.*' of block 2 is a transposed or grouped"):
        model.narrow(0.5)


def test_unknown_layer_is_refused_by_name() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Bilinear(8, 8, 8), nn.Linear(8, 2))
    blocks = {"a": module[0], "b": module[1], "c": module[2]}
    model = BlockModel("toy", blocks, {"a": nn.Linear(8, 2), "b": nn.Linear(8, 2)}, num_classes=2)
    with pytest.raises(ModelError, match=r"'blocks.b' of block 2 is a Bilinear.*narrow_\(width\)"):
        model.narrow(0.5)


def test_a_model_that_does_not_run_narrowed_is_refused_by_block() -> None:
    class FixedShape(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).reshape(len(x), 8)

    module = nn.Sequential(nn.Linear(4, 8), FixedShape(), nn.Linear(8, 2))
    model = as_block_model(module, torch.randn(2, 4))
    with pytest.raises(ModelError, match=r"block 2 'block2' of model custom does not run at width 0\.5"):
        model.narrow(0.5)


def test_keep_never_leaves_nothing() -> None:
    assert [keep(10, 0.01), keep(10, 0.7), keep(10, 0.71)] == [1, 7, 8]
