"""VGG16 with one block per layer (section 5.1), and a small network of the same kind for small images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedel.models.blocks import BlockModel
from fedel.models.exits import EXIT_FEATURES, make_exit
from fedel.models.narrow import keep

VGG16_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
SMALL_STAGES = ((16, 16), (32, 32), (64, 64))


def vgg16(
    num_classes: int = 10,
    batch_norm: bool = False,
    width: float = 1.0,
    in_channels: int = 3,
    hidden_layers: Sequence[int] = (),
    feature_size: int = 1,
    exit_features: int = EXIT_FEATURES,
    image_size: int = 0,
) -> BlockModel:
    """13 convolution blocks and a classifier; ``width`` scales every channel count.

    ``hidden_layers``, such as ``(512, 512)``, adds fully connected blocks before the classifier; they read
    ``feature_size`` x ``feature_size`` averages of each channel. ``exit_features`` is how many averages the
    exits read, 0: one of each channel; no grid of them is finer than images of ``image_size`` pixels allow.
    """
    return _vgg(
        "vgg16",
        VGG16_STAGES,
        num_classes,
        batch_norm,
        width,
        in_channels,
        exit_features,
        image_size,
        tuple(hidden_layers),
        feature_size,
    )


def small_cnn(
    num_classes: int = 10,
    in_channels: int = 1,
    width: float = 1.0,
    batch_norm: bool = False,
    exit_features: int = EXIT_FEATURES,
    image_size: int = 0,
) -> BlockModel:
    """6 convolution blocks and a classifier, 72 thousand parameters, for images of 8x8 to 32x32."""
    return _vgg("cnn", SMALL_STAGES, num_classes, batch_norm, width, in_channels, exit_features, image_size)


def _vgg(
    name: str,
    stages: Sequence[Sequence[int]],
    num_classes: int,
    batch_norm: bool,
    width: float,
    in_channels: int,
    exit_features: int,
    image_size: int,
    hidden_layers: tuple[int, ...] = (),
    feature_size: int = 1,
) -> BlockModel:
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    exits: OrderedDict[str, nn.Module] = OrderedDict()
    ends, channels, side = [], in_channels, image_size
    for s, sizes in enumerate(stages, start=1):
        for i, size in enumerate(sizes, start=1):
            block = f"conv{s}_{i}"
            pool = i == len(sizes)
            blocks[block] = _conv_block(channels, keep(size, width), batch_norm, pool)
            channels, side = keep(size, width), -(-side // 2) if pool else side
            exits[block] = make_exit((1, channels, side, side), num_classes, features=exit_features)
        ends.append(len(blocks))

    entry = OrderedDict[str, nn.Module](pool=nn.AdaptiveAvgPool2d(feature_size), flatten=nn.Flatten())
    features = channels * feature_size**2
    for i, size in enumerate(hidden_layers, start=1):
        linear = nn.Linear(features, keep(size, width))
        _he_init(linear)
        blocks[f"fc{i}"] = nn.Sequential(OrderedDict(**entry, linear=linear, relu=nn.ReLU()))
        entry, features = OrderedDict(), keep(size, width)
        exits[f"fc{i}"] = make_exit((1, features), num_classes)
    blocks["classifier"] = nn.Sequential(OrderedDict(**entry, linear=nn.Linear(features, num_classes)))
    # DepthFL cuts at the ends of the last four stages; the deepest cut is the whole network.
    depths = (*ends[:-1], len(blocks))[-4:]
    return BlockModel(name, blocks, exits, num_classes=num_classes, stages=depths)


def _conv_block(in_channels: int, out_channels: int, batch_norm: bool, pool: bool) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1)
    _he_init(conv)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv=conv)
    if batch_norm:
        layers["bn"] = nn.BatchNorm2d(out_channels)
    layers["relu"] = nn.ReLU()
    if pool:
        # Rounding up lets images smaller than 32x32 pass five halvings.
        layers["pool"] = nn.MaxPool2d(2, ceil_mode=True)
    return nn.Sequential(layers)


def _he_init(layer: nn.Conv2d | nn.Linear) -> None:
    """He's initial values; without them the 13 layers do not train from scratch."""
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
