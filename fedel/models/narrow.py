"""HeteroFL's sub-models: the first channels of every hidden layer of any block model (Diao et al., ICLR 2021).

Works layer by layer on a copy. The outputs of a layer shrink to ``ceil(width * C)``, its inputs to what the
layer before it kept; the input of the network and the classes never shrink. A module that needs more than that
(such as the heads of an attention) has a method ``narrow_(width)``, which cuts the module in place and returns
the place of each of its tensors in the full tensors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from fedel.errors import ModelError
from fedel.models.blocks import BlockModel
from fedel.models.exits import GridExit
from fedel.types import Role, Where


@runtime_checkable
class Narrows(Protocol):
    """A module that can narrow itself."""

    def narrow_(self, width: float) -> Mapping[str, Where]:
        """Cut the module in place; returns name of each tensor -> its place in the full tensor."""
        ...


@dataclass(frozen=True)
class Flow:
    """Output of the layers so far: number of channels in the full model, and whether all are kept."""

    channels: int | None
    whole: bool


def keep(count: int, width: float) -> int:
    """Channels kept of ``count``; the slack corrects rounding such as ``0.1 * 30 = 3.0000000000000004``.

    >>> keep(64, 0.5), keep(3, 0.5), keep(30, 0.1)
    (32, 2, 3)
    """
    return max(1, math.ceil(width * count - 1e-9))


def narrow(model: BlockModel, width: float) -> tuple[BlockModel, dict[str, Where]]:
    if not 0 < width <= 1:
        raise ModelError(
            f"width {width} of model {model.spec.name} is not in (0, 1]; give a share of its channels"
        )
    small = copy.deepcopy(model)
    places: dict[str, Where] = {}
    flow = Flow(None, whole=True)
    for number, name in enumerate(small.block_names, start=1):
        last = name not in small.exits
        flow = _narrow_part(small.blocks[name], f"blocks.{name}", number, flow, width, last, places)
        if not last:
            head = small.exits[name]
            # A block that narrows itself does not say how many channels it has; an exit made for it does.
            entering = Flow(head.channels, flow.whole) if isinstance(head, GridExit) else flow
            _narrow_part(head, f"exits.{name}", number, entering, width, True, places)
    narrowed = BlockModel(
        model.spec.name,
        dict(small.blocks.items()),
        dict(small.exits.items()),
        num_classes=model.num_classes,
        stages=model.spec.stages,
        exit_each=model.spec.exit_each,
        frozen=[t.name for t in model.spec.tensors if t.role is Role.FROZEN],
        example=model.example,
    )
    narrowed.train(model.training)
    _try_out(narrowed, width)
    return narrowed, {t.name: places.get(t.name) for t in narrowed.spec.tensors}


def cut(module: nn.Module, name: str, where: tuple[Any, ...]) -> Where:
    """Keep only the part of the module's tensor that ``where`` indexes; ``None`` keeps all of it."""
    full: Tensor = getattr(module, name)
    part = full.detach()[where].clone()
    if part.shape == full.shape:
        return None
    if isinstance(full, nn.Parameter):
        setattr(module, name, nn.Parameter(part, requires_grad=full.requires_grad))
    else:
        setattr(module, name, part)
    return where


def _narrow_part(
    root: nn.Module, place: str, block: int, flow: Flow, width: float, ends: bool, places: dict[str, Where]
) -> Flow:
    """Narrow all layers of a block or an exit; if it ``ends`` in logits, the last layer keeps all of them."""
    layers = _layers(root, place, block)
    ending = [layer for _, layer in layers if isinstance(layer, nn.Linear | _ConvNd | Narrows)]
    for name, layer in layers:
        if isinstance(layer, Narrows):
            cuts = dict(layer.narrow_(width))
            flow = Flow(None, whole=all(where is None for where in cuts.values()))
        elif isinstance(layer, _BatchNorm | nn.LayerNorm):
            cuts = _narrow_norm(layer, flow, width)
        elif isinstance(layer, nn.Embedding):
            cuts, flow = _narrow_embedding(layer, width)
        elif isinstance(layer, nn.Linear):
            cuts, flow = _narrow_linear(layer, flow, width, keep_outputs=ends and layer is ending[-1])
        else:
            assert isinstance(layer, _ConvNd)
            cuts, flow = _narrow_conv(layer, flow, width, keep_outputs=ends and layer is ending[-1])
        places.update({f"{name}.{tensor}": where for tensor, where in cuts.items()})
    return flow


def _layers(module: nn.Module, name: str, block: int) -> list[tuple[str, nn.Module]]:
    """The layers with tensors, in forward order."""
    if isinstance(module, Narrows):
        return [(name, module)]
    if next(module.parameters(recurse=False), None) is None:
        return [leaf for child, m in module.named_children() for leaf in _layers(m, f"{name}.{child}", block)]
    if isinstance(module, _ConvNd) and (module.transposed or not (module.groups == 1 or _is_depthwise(module))):
        raise ModelError(
            f"layer '{name}' of block {block} is a transposed or grouped convolution, which has no first"
            " channels to take; use an ordinary or depthwise one, or a method other than HeteroFL"
        )
    if not isinstance(module, _ConvNd | nn.Linear | _BatchNorm | nn.LayerNorm | nn.Embedding):
        raise ModelError(
            f"layer '{name}' of block {block} is a {type(module).__name__}, which FedEL cannot narrow; give the"
            " layer a method narrow_(width) (see docs/own-model.md), or use a method other than HeteroFL"
        )
    return [(name, module)]


def _is_depthwise(conv: _ConvNd) -> bool:
    return conv.groups == conv.in_channels == conv.out_channels


def _narrow_conv(conv: _ConvNd, flow: Flow, width: float, keep_outputs: bool) -> tuple[dict[str, Where], Flow]:
    full = conv.out_channels
    num_in = conv.in_channels if flow.whole else keep(conv.in_channels, width)
    if conv.groups > 1:
        conv.groups = conv.in_channels = conv.out_channels = num_in
        return _cut_layer(conv, num_in, 1), Flow(full, flow.whole)
    conv.in_channels, conv.out_channels = num_in, full if keep_outputs else keep(full, width)
    return _cut_layer(conv, conv.out_channels, num_in), Flow(full, whole=keep_outputs)


def _narrow_linear(
    linear: nn.Linear, flow: Flow, width: float, keep_outputs: bool
) -> tuple[dict[str, Where], Flow]:
    full = linear.out_features
    linear.in_features = _features(linear.in_features, flow, width)
    linear.out_features = full if keep_outputs else keep(full, width)
    return _cut_layer(linear, linear.out_features, linear.in_features), Flow(full, whole=keep_outputs)


def _cut_layer(layer: nn.Module, num_out: int, num_in: int) -> dict[str, Where]:
    cuts = {"weight": cut(layer, "weight", (slice(0, num_out), slice(0, num_in)))}
    if layer.bias is not None:
        cuts["bias"] = cut(layer, "bias", (slice(0, num_out),))
    return cuts


def _narrow_embedding(layer: nn.Embedding, width: float) -> tuple[dict[str, Where], Flow]:
    full, layer.embedding_dim = layer.embedding_dim, keep(layer.embedding_dim, width)
    where = (slice(0, layer.num_embeddings), slice(0, layer.embedding_dim))
    return {"weight": cut(layer, "weight", where)}, Flow(full, whole=False)


def _narrow_norm(layer: _BatchNorm | nn.LayerNorm, flow: Flow, width: float) -> dict[str, Where]:
    where: tuple[slice, ...]
    if isinstance(layer, nn.LayerNorm):
        *outer, features = layer.normalized_shape
        layer.normalized_shape = (*outer, _features(features, flow, width))
        where = tuple(slice(0, n) for n in layer.normalized_shape)
    else:
        layer.num_features = _features(layer.num_features, flow, width)
        where = (slice(0, layer.num_features),)
    names = ("weight", "bias", "running_mean", "running_var")
    return {name: cut(layer, name, where) for name in names if getattr(layer, name, None) is not None}


def _features(count: int, flow: Flow, width: float) -> int:
    """Features kept of ``count``; after a flatten each channel has several features."""
    if flow.whole:
        return count
    if flow.channels and count % flow.channels == 0:
        return keep(flow.channels, width) * (count // flow.channels)
    return keep(count, width)


def _try_out(model: BlockModel, width: float) -> None:
    if model.example is None:
        return
    training, x = model.training, model.example
    model.eval()
    for number, name in enumerate(model.block_names, start=1):
        try:
            with torch.no_grad():
                x = model.run(x, number, number)
                model.exit(number, x)
        except (RuntimeError, ValueError) as error:
            raise ModelError(
                f"block {number} '{name}' of model {model.spec.name} does not run at width {width:g}: {error};"
                " give its module a method narrow_(width) (see docs/own-model.md)"
            ) from error
    model.train(training)
