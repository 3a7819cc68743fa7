"""ResNet50 for spectrograms: the stem, 16 bottlenecks and the classifier are its 18 blocks (section 5.1)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from fedel.models.blocks import BlockModel
from fedel.models.exits import EXIT_FEATURES, make_exit
from fedel.models.narrow import keep

DEPTHS = (3, 4, 6, 3)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut.

    A strategy sees the tensors as a chain in the order of definition. So the projection is defined next to
    conv1: both read the input of the block.
    """

    def __init__(self, in_channels: int, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.shortcut = nn.Sequential()
        if stride > 1 or in_channels != out_channels:
            self.shortcut.add_module("conv", _conv(in_channels, out_channels, 1, stride))
            self.shortcut.add_module("bn", nn.BatchNorm2d(out_channels))
        self.conv1 = _conv(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU()
        self.conv3 = _conv(channels, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(x)))
        out: Tensor = self.relu3(self.bn3(self.conv3(x)) + shortcut)
        return out


def resnet50(
    num_classes: int = 35,
    in_channels: int = 1,
    width: float = 1.0,
    zero_init: bool = False,
    exit_features: int = EXIT_FEATURES,
    image_size: int = 0,
) -> BlockModel:
    """``width`` scales every channel count; with ``zero_init`` every bottleneck starts as its shortcut.

    ``exit_features`` is how many averages the exits read, 0: one of each channel; no grid of them is finer
    than images of ``image_size`` pixels allow.
    """
    channels, side = keep(64, width), -(-image_size // 4)
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=_stem(in_channels, channels))

    def head(channels: int, side: int) -> nn.Module:
        return make_exit((1, channels, side, side), num_classes, features=exit_features)

    exits: OrderedDict[str, nn.Module] = OrderedDict(stem=head(channels, side))
    ends = []
    for stage, depth in enumerate(DEPTHS, start=1):
        inner = 64 * 2 ** (stage - 1)
        out_channels = keep(inner * EXPANSION, width)
        for i in range(1, depth + 1):
            stride = 2 if stage > 1 and i == 1 else 1
            bottleneck = Bottleneck(channels, keep(inner, width), out_channels, stride)
            if zero_init:
                nn.init.zeros_(bottleneck.bn3.weight)
            channels, side = out_channels, -(-side // stride)
            blocks[f"layer{stage}_{i}"] = bottleneck
            exits[f"layer{stage}_{i}"] = head(channels, side)
        ends.append(len(blocks))
    blocks["classifier"] = make_exit((1, channels, 1, 1), num_classes, features=0)
    return BlockModel("resnet50", blocks, exits, num_classes=num_classes, stages=(*ends[:-1], len(blocks)))


def _stem(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv=_conv(in_channels, channels, 7, stride=2),
            bn=nn.BatchNorm2d(channels),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(3, stride=2, padding=1),
        )
    )


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
