"""The models of the paper's evaluation have the blocks, tensors and parameters they should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from fedel.errors import ModelError
from fedel.models import BlockModel, build
from fedel.models.exits import EXIT_FEATURES, exit_grid


def counted(name: str, **options: Any) -> BlockModel:
    """Shapes without memory."""
    with torch.device("meta"):
        return build(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "num_blocks", "num_tensors", "num_parameters", "stages"),
    [
        ("vgg16", {}, 14, 28, 14_719_818, (4, 7, 10, 14)),
        ("vgg16", {"num_classes": 200}, 14, 28, 14_817_288, (4, 7, 10, 14)),
        ("vgg16", {"batch_norm": True}, 14, 54, 14_728_266, (4, 7, 10, 14)),
        ("vgg16", {"hidden_layers": (512, 512)}, 16, 32, 15_245_130, (4, 7, 10, 16)),
        (
            "vgg16",
            {"num_classes": 200, "hidden_layers": (4096, 4096), "feature_size": 2},
            16,
            32,
            40_708_104,
            (4, 7, 10, 16),
        ),
        ("resnet50", {}, 18, 161, 23_573_475, (4, 8, 14, 18)),
        ("albert", {"mode": "frozen"}, 12, 72, 12 * 3_969_968, (3, 6, 9, 12)),
        ("albert", {"mode": "unshared"}, 12, 204, 93_029_296, (3, 6, 9, 12)),
        ("cnn", {}, 7, 14, 72_442, (2, 4, 7)),
    ],
)
def test_counts(
    name: str,
    options: dict[str, Any],
    num_blocks: int,
    num_tensors: int,
    num_parameters: int,
    stages: tuple[int, ...],
) -> None:
    spec = counted(name, **options).spec
    assert num_blocks == spec.num_blocks
    assert num_tensors == len(spec.weights)
    assert num_parameters == sum(t.size for t in spec.weights)
    assert stages == spec.stages


def test_vgg16_parameters_block_by_block() -> None:
    spec = counted("vgg16").spec
    sizes = [sum(t.size for t in spec.weights_in(b, b)) for b in range(1, 15)]
    wide = 2_359_808
    assert sizes == [
        *(1_792, 36_928, 73_856, 147_584, 295_168, 590_080, 590_080, 1_180_160),
        *(wide, wide, wide, wide, wide, 5_130),
    ]


def test_exit_widths() -> None:
    def widths(name: str, **options: Any) -> list[int]:
        spec = counted(name, **options).spec
        return [t.shape[1] for t in spec.tensors if t.name.startswith("exits.") and t.name.endswith(".weight")]

    assert widths("vgg16", exit_features=0) == [64, 64, 128, 128, 256, 256, 256] + 6 * [512]
    assert widths("vgg16") == 2 * [4 * 64] + 2 * [4 * 128] + 3 * [256] + 6 * [512]
    assert widths("resnet50", exit_features=0) == [64] + 3 * [256] + 4 * [512] + 6 * [1024] + 3 * [2048]
    assert widths("resnet50") == [4 * 64] + 3 * [256] + 4 * [512] + 6 * [1024] + 3 * [2048]
    assert widths("cnn") == 2 * [25 * 16] + 2 * [16 * 32] + 2 * [4 * 64]
    assert widths("cnn", exit_features=128) == 2 * [4 * 16] + 2 * [4 * 32] + 2 * [64]


@pytest.mark.parametrize("size", [7, 8, 14, 28, 33])
@pytest.mark.parametrize(("name", "channels"), [("cnn", 1), ("vgg16", 3), ("resnet50", 1)])
def test_no_exit_has_a_finer_grid_than_its_block_has_positions(name: str, channels: int, size: int) -> None:
    x = torch.randn(2, channels, size, size)
    model = build(name, sample_input=x, width=1 / 16).eval()
    finest = []
    for number, block in enumerate(model.block_names[:-1], start=1):
        x = model.run(x, number, number)
        grid = model.exits[block].pool.output_size
        assert grid == exit_grid(x.shape, EXIT_FEATURES)
        finest.append(grid[0] == x.shape[-1])
    assert any(finest)
    assert model.blocks["classifier"].linear.in_features == model.exits[block].channels


def test_exits_take_any_image_when_its_size_is_not_known() -> None:
    for size in (8, 40):
        assert {logits.shape for logits in build("cnn").all_exits(torch.randn(2, 1, size, size))} == {(2, 10)}


@pytest.mark.parametrize("exit_features", [0, 512])
def test_every_exit_starts_near_the_loss_of_a_guess(exit_features: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 1, 28, 28), torch.arange(64) % 10
    model = build("cnn", sample_input=x, batch_norm=True, exit_features=exit_features)
    for logits in model.all_exits(x):
        assert abs(nn.functional.cross_entropy(logits, y).item() - math.log(10)) < 0.6


def test_an_exit_sees_where_something_is() -> None:
    """One average per channel is the same for an image and the image upside down."""
    torch.manual_seed(0)
    h = torch.randn(1, 16, 14, 14)
    for exit_features, sees in ((0, False), (512, True)):
        model = build("cnn", exit_features=exit_features)
        assert sees is not torch.allclose(model.exit(1, h), model.exit(1, h.flip(2)), atol=1e-5)


def test_bad_exit_features_are_named() -> None:
    with pytest.raises(ModelError, match="exit_features is -1"):
        build("cnn", exit_features=-1)
    with pytest.raises(ModelError, match="'albert' makes its own exits: leave the option exit_features out"):
        counted("albert", exit_features=0)


def test_weights_saved_with_other_exits_say_which_option_to_use() -> None:
    with pytest.raises(ModelError, match=r"'exits\.conv1_1\.linear\.weight'.*exit_features = 0"):
        build("cnn").load(build("cnn", exit_features=0).tensors())


def test_a_bottlenecks_projection_stands_beside_conv1() -> None:
    spec = counted("resnet50").spec
    kernels = [t.name for t in spec.weights_in(2, 2) if len(t.shape) == 4]
    assert kernels == [
        f"blocks.layer1_1.{conv}.weight" for conv in ("shortcut.conv", "conv1", "conv2", "conv3")
    ]
    assert not any("shortcut" in t.name for t in spec.weights_in(3, 3))


@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_vgg16_takes_small_and_large_images(size: int) -> None:
    model = build("vgg16", width=1 / 16)
    assert model(torch.randn(2, 3, size, size)).shape == (2, 10)


def test_resnet50_ends_in_one_pixel_for_a_32x32_spectrogram() -> None:
    model = build("resnet50", width=1 / 16).eval()
    x = torch.randn(2, 1, 32, 32)
    assert model.run(x, 1, 17).shape == (2, 128, 1, 1)
    assert {logits.shape for logits in model.all_exits(x)} == {(2, 35)}


def test_zero_init_makes_bottlenecks_start_as_their_shortcuts() -> None:
    model = build("resnet50", width=1 / 16, zero_init=True).eval()
    h = model.run(torch.randn(1, 1, 32, 32), 1, 2)
    assert torch.equal(h, model.run(h, 3, 3))


def test_he_initialisation_keeps_the_signal_through_thirteen_layers() -> None:
    torch.manual_seed(0)
    model = build("vgg16", width=0.25)
    h = model.run(torch.randn(4, 3, 32, 32), 1, 13)
    assert 0.1 < h.std().item() < 10


def test_same_seed_same_values() -> None:
    def first_and_last() -> list[float]:
        torch.manual_seed(3)
        values = build("cnn").tensors()
        return [float(values[n].sum()) for n in ("blocks.conv1_1.conv.weight", "exits.conv3_2.linear.weight")]

    assert first_and_last() == first_and_last()


def test_wrong_model_name_gives_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"model 'vgg61' is unknown .*package\.module.*did you mean 'vgg16'"):
        build("vgg61")


def test_wrong_option_gives_the_nearest() -> None:
    with pytest.raises(ModelError, match="'resnet50' has no option 'widht'; did you mean 'width'"):
        build("resnet50", widht=0.5)


def test_number_of_classes_comes_from_the_data() -> None:
    assert build("cnn", num_classes=26).num_classes == 26
    assert counted("albert", num_classes=500).num_classes == 500


def test_a_batch_of_the_data_tells_the_number_of_channels():
    model = build("vgg16", sample_input=torch.zeros(2, 1, 28, 28), num_classes=10, width=0.125)
    assert (8, 1, 3, 3) == model.spec.tensors[0].shape
