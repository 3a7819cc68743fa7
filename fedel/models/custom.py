"""The user's own network as a block model: split into blocks, exits made from a dry run."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedel import plugins
from fedel.errors import ModelError
from fedel.models.blocks import BlockModel
from fedel.models.exits import EXIT_FEATURES, make_exit

JOINS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.PReLU)
"""Layers that have weights and yet join the block before: a conv and its norm are cut nowhere between."""


def load_model(path: str, sample_input: Tensor | None = None, **options: Any) -> BlockModel:
    """Call ``package.module:function`` and split what it returns into blocks."""
    return as_model(plugins.load(path, "model", ModelError)(**options), path, sample_input)


def as_model(made: Any, name: str, sample_input: Tensor | None, exit_features: int | None = None) -> BlockModel:
    """What a model function returned, as a block model; one that is a block model already stays as it is."""
    if isinstance(made, BlockModel):
        if exit_features is not None:
            raise ModelError(f"model '{name}' makes its own exits: leave the option exit_features out")
        return made
    if not isinstance(made, nn.Module):
        raise ModelError(f"'{name}' returned a {type(made).__name__}; it must return a torch.nn.Module")
    if sample_input is None:
        raise ModelError(
            f"'{name}' returned a plain module, whose exits need a sample input to be made for; pass"
            " sample_input, or let the function return as_block_model(module, sample_input)"
        )
    return as_block_model(made, sample_input, name=name, exit_features=exit_features)


def as_block_model(
    module: nn.Module,
    sample_input: Tensor,
    num_classes: int | None = None,
    name: str = "custom",
    exit_features: int | None = None,
) -> BlockModel:
    """Split an ``nn.Sequential``, or a module with a method ``blocks()``, and make the exits.

    Parts without weights, and norms, join the block before them; leading ones the block after. A method
    ``exits()`` of the module gives its own heads, one for every block but the last; else ``exit_features``
    says how many averages they read, 0: one of each channel. The module's layers become part of the model;
    they are not copied.
    """
    blocks = _group(_parts(module, name))
    if len(blocks) < 2:
        raise ModelError(
            f"model '{name}' has {len(blocks)} block(s) with weights, but a window needs at least 2 to slide"
            " over; split the network into more parts"
        )
    with _dry_run(nn.ModuleList([module, *blocks.values()])):
        outputs = _outputs(blocks, sample_input, name)
        _check_composition(module, sample_input, outputs[-1], name)
    logits = outputs[-1]
    if logits.ndim not in (2, 3) or (num_classes or logits.shape[-1]) != logits.shape[-1]:
        raise ModelError(
            f"model '{name}' ends in shape {tuple(logits.shape)}, not in (batch, {num_classes or 'classes'}) or"
            f" (batch, tokens, {num_classes or 'classes'}); change its last block"
        )
    exits = _own_exits(module, list(blocks), name)
    if exits and exit_features is not None:
        raise ModelError(f"model '{name}' has exits() of its own: leave the option exit_features out")
    features = EXIT_FEATURES if exit_features is None else exit_features
    exits = exits or _made_exits(blocks, outputs, features)
    frozen = [
        tensor
        for part, modules in (("blocks", blocks), ("exits", exits))
        for block, inner in modules.items()
        for tensor, value in inner.named_parameters(f"{part}.{block}")
        if not value.requires_grad
    ]
    model = BlockModel(
        name, blocks, exits, num_classes=logits.shape[-1], frozen=frozen, example=sample_input[:1].detach()
    )
    with _dry_run(model):
        _check_exits(model, sample_input, logits)
    return model


def _parts(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    own = getattr(module, "blocks", None)
    if callable(own) and not isinstance(own, nn.Module):
        listed = own()
        if isinstance(listed, Mapping):
            return list(listed.items())
        attributes = {id(m): n.replace(".", "_") for n, m in module.named_modules() if n}
        return [(attributes.get(id(m), str(i)), m) for i, m in enumerate(listed)]
    if isinstance(module, nn.Sequential):
        return list(module.named_children())
    raise ModelError(
        f"model '{name}' ({type(module).__name__}) cannot be split: it is not an nn.Sequential and has no"
        " method blocks(); add one that returns its parts in order: running one after the other is forward()"
    )


def _group(parts: Sequence[tuple[str, nn.Module]]) -> OrderedDict[str, nn.Module]:
    groups: list[tuple[str, list[tuple[str, nn.Module]]]] = []
    leading: list[tuple[str, nn.Module]] = []
    for label, part in parts:
        if next(part.parameters(), None) is not None and not isinstance(part, JOINS):
            groups.append((label, [*leading, (label, part)]))
            leading = []
        elif groups:
            groups[-1][1].append((label, part))
        else:
            leading.append((label, part))
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (label, group) in enumerate(groups, start=1):
        if label.isdigit() or label in blocks or hasattr(nn.ModuleDict, label):
            label = f"block{number}"
        blocks[label] = group[0][1] if len(group) == 1 else nn.Sequential(OrderedDict(group))
    return blocks


@contextlib.contextmanager
def _dry_run(module: nn.Module) -> Iterator[None]:
    """Without gradients and in evaluation mode, so that no batch-norm statistic moves."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, training in modes:
            m.training = training


def _outputs(blocks: Mapping[str, nn.Module], x: Tensor, name: str) -> list[Tensor]:
    outputs: list[Tensor] = []
    for number, (block, module) in enumerate(blocks.items(), start=1):
        try:
            out = module(outputs[-1] if outputs else x)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ModelError(
                f"block {number} '{block}' of model '{name}' fails on the output of the one before: {error};"
                " each block must take exactly what the block before returns"
            ) from error
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.ndim < 2 or len(out) != len(x):
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise ModelError(
                f"no exit can be built after block {number} '{block}' of model '{name}': it returns {got},"
                f" not one float tensor of {len(x)} samples and their features; let it return such a tensor"
            )
        outputs.append(out)
    return outputs


def _check_composition(module: nn.Module, x: Tensor, composed: Tensor, name: str) -> None:
    whole = module(x)
    if not isinstance(whole, Tensor) or whole.shape != composed.shape:
        got = tuple(whole.shape) if isinstance(whole, Tensor) else type(whole).__name__
        raise ModelError(
            f"the blocks of model '{name}', one after the other, give shape {tuple(composed.shape)}, but its"
            f" forward gives {got}; blocks() must return every part of forward(), in order"
        )
    if not torch.allclose(whole, composed, rtol=1e-4, atol=1e-5):
        difference = (whole - composed).abs().max().item()
        raise ModelError(
            f"the blocks of model '{name}', one after the other, differ from its forward by {difference:.3g};"
            " blocks() must return every part of forward(), in order (activations and reshapes too)"
        )


def _own_exits(module: nn.Module, blocks: list[str], name: str) -> dict[str, nn.Module] | None:
    own = getattr(module, "exits", None)
    if not callable(own) or isinstance(own, nn.Module):
        return None
    listed = own()
    if isinstance(listed, Mapping):
        return dict(listed)
    if len(listed) != len(blocks) - 1:
        raise ModelError(
            f"exits() of model '{name}' returns {len(listed)} heads for {len(blocks)} blocks; give one for each"
            f" of {', '.join(blocks[:-1])}"
        )
    return dict(zip(blocks, listed, strict=False))


def _made_exits(
    blocks: Mapping[str, nn.Module], outputs: Sequence[Tensor], features: int
) -> dict[str, nn.Module]:
    logits = outputs[-1]
    return {
        block: make_exit(
            out.shape,
            logits.shape[-1],
            features=features,
            tokens=logits.ndim == 3 or not _ends_in_convolution(module),
            each_token=logits.ndim == 3,
        ).to(out.device)
        for (block, module), out in zip(blocks.items(), outputs[:-1], strict=False)
    }


def _ends_in_convolution(block: nn.Module) -> bool:
    """Whether channels stand second in the output, (N, C, L), rather than last, (N, L, H)."""
    layers = [m for m in block.modules() if next(m.parameters(recurse=False), None) is not None]
    return isinstance(layers[-1], (_ConvNd, _NormBase, nn.GroupNorm))


def _check_exits(model: BlockModel, x: Tensor, logits: Tensor) -> None:
    for number, block in enumerate(model.block_names[:-1], start=1):
        x = model.run(x, number, number)
        try:
            got = tuple(model.exit(number, x).shape)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"the exit after block {number} '{block}' of model '{model.spec.name}' failed on an input of"
                f" shape {tuple(x.shape)}: {error}; correct exits()"
            ) from error
        if got != tuple(logits.shape):
            raise ModelError(
                f"the exit after block {number} '{block}' of model '{model.spec.name}' gives shape {got}, but"
                f" the model's own output is {tuple(logits.shape)}; correct exits()"
            )
