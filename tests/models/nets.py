"""Small networks as users write them: none lists its blocks, none imports FedEL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Basic(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if stride > 1 or before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """As torchvision's ResNet18."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        sizes = [(4, 4, 1), (4, 6, 2), (6, 8, 2), (8, 8, 1)]
        for number, (before, after, stride) in enumerate(sizes, start=1):
            layer = nn.Sequential(Basic(before, after, stride), Basic(after, after, 1))
            self.add_module(f"layer{number}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Squeeze(nn.Module):
    """Squeeze-excite."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down = nn.Conv2d(channels, 2, 1)
        self.up = nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(self.pool(x)))))


class Inverted(nn.Module):
    def __init__(self, before: int, hidden: int, after: int, stride: int) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(before, hidden, 1), nn.BatchNorm2d(hidden), nn.Hardswish())
        deep = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden)
        self.depthwise = nn.Sequential(deep, nn.BatchNorm2d(hidden), nn.Hardswish(inplace=True))
        self.se = Squeeze(hidden)
        self.project = nn.Sequential(nn.Conv2d(hidden, after, 1), nn.BatchNorm2d(after))
        self.shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.se(self.depthwise(self.expand(x))))
        return x + out if self.shortcut else out


class MobileNet(nn.Module):
    """As MobileNetV3."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Hardswish()),
            Inverted(4, 8, 4, 1),
            Inverted(4, 8, 6, 2),
            Inverted(6, 8, 6, 1),
        )
        self.classifier = nn.Sequential(
            nn.Linear(6, 8), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(8, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Attention(nn.Module):
    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, size))


class VitLayer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.attention = Attention(size, 2)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """A vision transformer with a class token and positions; ``blocks`` is a child, not a method."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, 8))
        self.pos = nn.Parameter(0.02 * torch.randn(1, 17, 8))
        self.blocks = nn.ModuleList(VitLayer(8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(batch, -1, -1), x], dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Bert(nn.Module):
    """An encoder over tokens that makes its mask inside: tokens look back only, or not at padding."""

    def __init__(self, num_classes: int, padding: bool = False) -> None:
        super().__init__()
        self.padding = padding
        self.words = nn.Embedding(20, 8)
        self.positions = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, num_classes)

    def forward(self, ids: Tensor, position: Tensor | None = None) -> Tensor:
        length = ids.size(1)
        if position is None:
            position = torch.arange(length, device=ids.device)
        x = self.words(ids) + self.positions(position)
        if self.padding:
            x = self.encoder(x, src_key_padding_mask=ids == 0)
        else:
            above = torch.ones(length, length, device=ids.device).triu(1).bool()
            x = self.encoder(x, mask=above)
        return self.head(x.mean(1))


class UNet(nn.Module):
    """Every stage of the way down is read again on the way up."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, 1, 1), nn.Conv2d(4, 6, 3, 2, 1)
        self.middle = nn.Conv2d(6, 6, 3, 1, 1)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2)
        self.out = nn.Conv2d(8 + 3, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.middle(F.relu(self.down2(one))))
        return self.out(torch.cat([one, self.up(two), x], 1)).mean((2, 3))


class Gru(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6)
        self.gru = nn.GRU(6, 8, batch_first=True)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        _, state = self.gru(self.embed(ids))
        return self.fc(state[-1])


class Dense(nn.Module):
    """A dense block, whose layers read all layers before them."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(before + 2 * n, 2, 3, 1, 1) for n in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for conv in self.convs:
            found.append(F.relu(conv(torch.cat(found, 1))))
        return torch.cat(found, 1)


class Inception(nn.Module):
    def __init__(self, before: int) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(before, 3, 1), nn.Conv2d(before, 3, 3, 1, 1)
        self.pooled = nn.Conv2d(before, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.pooled(F.max_pool2d(x, 3, 1, 1))], 1).relu()


class DenseNet(nn.Module):
    """Dense blocks with a transition between, and an inception block with three branches."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 2, 1)
        self.dense1, self.transition = Dense(4), nn.Conv2d(10, 4, 1)
        self.dense2, self.inception = Dense(4), Inception(10)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(self.transition(self.dense1(self.stem(x))), 2)
        return self.fc(self.inception(self.dense2(x)).mean((2, 3)))


class Mlp(nn.Module):
    """Layers, and functions for the rest."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(768, 12), nn.Linear(12, 10), nn.Linear(10, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x.view(x.size(0), -1)))
        x = F.dropout(F.relu(self.fc2(x)), 0.5, training=self.training)
        return self.fc3(x)


NETS: dict[str, Any] = {
    "resnet": ResNet,
    "mobilenet": MobileNet,
    "vit": Vit,
    "bert": Bert,
    "unet": UNet,
    "gru": Gru,
    "densenet": DenseNet,
    "mlp": Mlp,
}
TOKENS = ("bert", "gru")


def net(kind: str, num_classes: int) -> nn.Module:
    """For jobs: ``tests.models.nets:net``."""
    made: nn.Module = NETS[kind](num_classes)
    return made


def data(kind: str, num_train: int = 96, num_test: int = 20) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random samples of three classes, as images of 16 pixels or as twelve tokens."""
    rng = torch.Generator().manual_seed(1)
    total = num_train + num_test
    y = torch.randint(0, 3, (total,), generator=rng)
    if kind in TOKENS:
        x = torch.randint(1, 20, (total, 12), generator=rng)
    else:
        x = torch.randn(total, 3, 16, 16, generator=rng) + y.view(-1, 1, 1, 1)
    return x[:num_train], y[:num_train], x[num_train:], y[num_train:]
