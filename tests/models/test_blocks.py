"""The block model itself: composition, exits, names and roles, taking over values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedel.errors import ModelError
from fedel.models import BlockModel, build
from fedel.types import Role


def small() -> BlockModel:
    torch.manual_seed(0)
    return build("cnn", width=0.25, batch_norm=True)


def linear_blocks(**blocks: nn.Module) -> BlockModel:
    exits = {name: nn.Linear(4, 2) for name in list(blocks)[:-1]}
    return BlockModel("toy", blocks, exits, num_classes=2)


def test_running_block_by_block_equals_forward() -> None:
    model, x = small().eval(), torch.randn(3, 1, 8, 8)
    h = x
    for block in range(1, 8):
        h = model.run(h, block, block)
    assert torch.equal(model(x), h)
    assert torch.equal(model(x), model.exit(7, model.run(model.run(x, 1, 3), 4, 7)))


def test_all_exits_are_those_of_run_and_exit_with_the_classifier_last() -> None:
    model, x = small().eval(), torch.randn(3, 1, 8, 8)
    for block, logits in enumerate(model.all_exits(x), start=1):
        assert torch.equal(model.exit(block, model.run(x, 1, block)), logits)
    assert torch.equal(model(x), model.all_exits(x)[-1])
    assert {logits.shape for logits in model.all_exits(x)} == {(3, 10)}


def test_running_no_block_changes_nothing() -> None:
    x = torch.randn(1, 1, 8, 8)
    assert small().run(x, 1, 0) is x


def test_tensors_stand_in_forward_order_and_each_has_its_role() -> None:
    spec = small().spec
    assert [t.block for t in spec.tensors] == sorted(t.block for t in spec.tensors)
    assert len(spec.by_name) == len(spec.tensors)
    assert [(t.name, t.role) for t in spec.tensors if t.block == 2] == [
        ("blocks.conv1_2.conv.weight", Role.WEIGHT),
        ("blocks.conv1_2.conv.bias", Role.WEIGHT),
        ("blocks.conv1_2.bn.weight", Role.WEIGHT),
        ("blocks.conv1_2.bn.bias", Role.WEIGHT),
        ("blocks.conv1_2.bn.running_mean", Role.BUFFER),
        ("blocks.conv1_2.bn.running_var", Role.BUFFER),
        ("exits.conv1_2.linear.weight", Role.EXIT),
        ("exits.conv1_2.linear.bias", Role.EXIT),
    ]


def test_names_are_those_of_the_state_dict_without_its_counters() -> None:
    model = small()
    floating = {name for name, value in model.state_dict().items() if value.is_floating_point()}
    assert floating == set(model.spec.by_name)


def test_loading_what_another_model_gave_makes_them_equal() -> None:
    torch.manual_seed(1)
    source, target = build("cnn", width=0.25), build("cnn", width=0.25)
    assert not np.array_equal(
        source.tensors()["blocks.conv1_1.conv.weight"], target.tensors()["blocks.conv1_1.conv.weight"]
    )
    target.load(source.tensors())
    for name, values in source.tensors().items():
        assert values.dtype == np.float32
        assert np.array_equal(values, target.tensors()[name])


def test_tensors_are_copies() -> None:
    model = small()
    model.tensors()["blocks.conv1_1.conv.weight"][:] = 7
    assert model.tensors()["blocks.conv1_1.conv.weight"].max() < 7


def test_loading_does_not_change_what_was_given() -> None:
    model = small()
    given = model.tensors()
    model.load(given)
    with torch.no_grad():
        model.blocks["conv1_1"].conv.weight.zero_()  # type: ignore[union-attr]
    assert given["blocks.conv1_1.conv.weight"].any()


def test_missing_tensor_is_named() -> None:
    model = small()
    values = model.tensors()
    del values["blocks.conv2_1.conv.bias"]
    with pytest.raises(ModelError, match=r"'blocks.conv2_1.conv.bias' \(block 3\) of model cnn is missing"):
        model.load(values)


def test_unknown_tensor_is_named_with_the_nearest() -> None:
    model = small()
    values = model.tensors() | {"blocks.conv2_1.conv.bia": np.zeros(1)}
    with pytest.raises(
        ModelError, match=r"no tensor 'blocks.conv2_1.conv.bia'.*did you mean 'blocks.conv2_1.conv.bias'"
    ):
        model.load(values)


def test_wrong_shape_is_named_and_nothing_is_loaded() -> None:
    model = small()
    before = model.tensors()
    values = {name: np.zeros_like(v) for name, v in before.items()} | {
        "blocks.classifier.linear.bias": np.zeros(3)
    }
    with pytest.raises(ModelError, match=r"'blocks.classifier.linear.bias' \(block 7\).*\(10,\).*\(3,\)"):
        model.load(values)
    assert all(np.array_equal(before[name], v) for name, v in model.tensors().items())


def test_weights_shared_between_blocks_are_refused() -> None:
    shared = nn.Linear(4, 4)
    with pytest.raises(ModelError, match=r"block 2 'b' uses tensor 'blocks.b.0.weight'.*'blocks.a'"):
        linear_blocks(a=shared, b=nn.Sequential(shared, nn.ReLU()), c=nn.Linear(4, 2))


def test_weights_shared_inside_a_block_count_once() -> None:
    shared = nn.Linear(4, 4)
    model = linear_blocks(a=nn.Sequential(shared, nn.ReLU(), shared), b=nn.Linear(4, 2))
    assert [t.name for t in model.spec.weights_in(1, 1)] == ["blocks.a.0.weight", "blocks.a.0.bias"]


def test_frozen_tensors_never_ask_for_a_gradient() -> None:
    model = BlockModel(
        "toy",
        {"a": nn.Linear(4, 4), "ab": nn.Linear(4, 4), "c": nn.Linear(4, 2)},
        {"a": nn.Linear(4, 2), "ab": nn.Linear(4, 2)},
        num_classes=2,
        frozen=("blocks.a",),
    )
    frozen = [t.name for t in model.spec.tensors if t.role is Role.FROZEN]
    assert frozen == ["blocks.a.weight", "blocks.a.bias"]
    assert frozen == [name for name, p in model.named_parameters() if not p.requires_grad]


def test_a_block_without_exit_is_refused() -> None:
    with pytest.raises(ModelError, match="block 'a' of model toy has no exit"):
        BlockModel("toy", {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}, {}, num_classes=2)


def test_an_exit_without_block_is_refused() -> None:
    blocks = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    with pytest.raises(ModelError, match="an exit for 'b', which is not one of the blocks"):
        BlockModel("toy", blocks, {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}, num_classes=2)


def test_double_precision_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'blocks.b.weight' \(block 2\) is float64.*\.float\(\)"):
        linear_blocks(a=nn.Linear(4, 4), b=nn.Linear(4, 2).double())
