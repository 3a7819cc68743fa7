"""The user's own network as a block model: split into blocks, exits made from a dry run."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedel import plugins
from fedel.errors import ModelError
from fedel.models.blocks import BlockModel
from fedel.models.cuts import JOINS
from fedel.models.exits import EXIT_FEATURES, make_exit
from fedel.models.split import SplitModel, cut
from fedel.models.trace import dry_run

_log = logging.getLogger(__name__)


def load_model(path: str, sample_input: Tensor | None = None, **options: Any) -> BlockModel:
    """Call ``package.module:function`` and split what it returns into blocks."""
    function = plugins.load(path, "model", ModelError)
    made = plugins.call(function, options, f"model '{path}'", "workload.model_options", ModelError)
    return as_model(made, path, sample_input)


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
    """Split an ``nn.Sequential``, a module with ``blocks()``, or one that torch.fx can follow; make the exits.

    Parts without weights, and norms, join the block before them; leading ones the block after. A method
    ``exits()`` of the module gives its own heads, one for every block but the last; else ``exit_features``
    says how many averages they read, 0: one of each channel. The module's layers become part of the model;
    they are not copied.
    """
    _check_types(module, name)
    with dry_run(module):
        whole = _whole(module, sample_input, name)
    blocks = _group(_parts(module, sample_input, name))
    if len(blocks) < 2:
        raise ModelError(
            f"model '{name}' has {len(blocks)} block(s) with weights, but a window needs at least 2 to slide"
            " over; split the network into more parts"
        )
    with dry_run(nn.ModuleList([module, *blocks.values()])):
        outputs = _outputs(blocks, sample_input, name)
        _check_composition(whole, outputs[-1], name)
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
    with dry_run(model):
        _check_exits(model, sample_input, logits)
    _warn_of_the_rest(module, model)
    return model


def _check_types(module: nn.Module, name: str) -> None:
    for tensor, value in module.named_parameters():
        if value.dtype is not torch.float32:
            raise ModelError(
                f"model '{name}': '{tensor}' is {str(value.dtype).removeprefix('torch.')}, but FedEL trains"
                " float32; call .float() on the model"
            )


def _whole(module: nn.Module, x: Tensor, name: str) -> Tensor | None:
    """What the user's own forward gives; ``None`` if it fails, so that the block that fails can be named."""
    try:
        out = module(x)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
        if isinstance(module, SplitModel) or not _lists_parts(module):
            raise ModelError(
                f"model '{name}' fails on a batch of your data, shape {tuple(x.shape)}: {error}; make its"
                " layers fit the data"
            ) from error
        return None
    if not isinstance(out, Tensor):
        raise ModelError(
            f"the forward of model '{name}' gives a {type(out).__name__}; return the logits tensor alone"
        )
    return out


def _lists_parts(module: nn.Module) -> bool:
    own = getattr(module, "blocks", None)
    return isinstance(module, nn.Sequential) or (callable(own) and not isinstance(own, nn.Module))


def _parts(module: nn.Module, x: Tensor, name: str) -> list[tuple[str, nn.Module]]:
    if isinstance(module, SplitModel):
        return list(module.blocks(x).items())
    if not _lists_parts(module):
        return _traced_parts(module, x, name)
    own = getattr(module, "blocks", None)
    if callable(own) and not isinstance(own, nn.Module):
        listed = own()
        if isinstance(listed, Mapping):
            return list(listed.items())
        attributes = {id(m): n.replace(".", "_") for n, m in module.named_modules() if n}
        return [(attributes.get(id(m), str(i)), m) for i, m in enumerate(listed)]
    return list(module.named_children())


def _traced_parts(module: nn.Module, x: Tensor, name: str) -> list[tuple[str, nn.Module]]:
    try:
        parts = cut(module, x)
    except ModelError as error:
        raise ModelError(
            f"model '{name}' ({type(module).__name__}) cannot be split: it is not an nn.Sequential, has no"
            f" method blocks(), and {error}"
        ) from error
    _log.info(
        "model '%s' has no method blocks() and was cut into %d blocks: %s",
        name,
        len(parts),
        ", ".join(parts),
    )
    return list(parts.items())


def _warn_of_the_rest(module: nn.Module, model: BlockModel) -> None:
    used = {id(tensor) for tensor in model.parameters()}
    rest = [tensor for tensor, value in module.named_parameters() if id(value) not in used]
    layers = list(dict.fromkeys(tensor.rpartition(".")[0] or tensor for tensor in rest))
    if layers:
        _log.warning(
            "model '%s': %s in no block and will not be trained",
            model.spec.name,
            f"{', '.join(f'`{layer}`' for layer in layers)} {'is' if len(layers) == 1 else 'are'}",
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


def _outputs(blocks: Mapping[str, nn.Module], x: Tensor, name: str) -> list[Tensor]:
    outputs: list[Tensor] = []
    for number, (block, module) in enumerate(blocks.items(), start=1):
        try:
            out = module(outputs[-1] if outputs else x)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            if number == 1:
                raise ModelError(
                    f"block 1 '{block}' of model '{name}' fails on a batch of your data, shape"
                    f" {tuple(x.shape)}: {error}; make its first layer fit the data"
                ) from error
            raise ModelError(
                f"block {number} '{block}' of model '{name}' fails on the output of the one before: {error};"
                " each block must take exactly what the block before returns"
            ) from error
        if not isinstance(out, Tensor) or not out.is_floating_point() or out.ndim < 2 or len(out) != len(x):
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            hint = ", such as the first part: return self.rnn(x)[0]" if isinstance(out, tuple) else ""
            raise ModelError(
                f"no exit can be built after block {number} '{block}' of model '{name}': it returns {got},"
                f" not one float tensor of {len(x)} samples and their features; let it return one{hint}"
            )
        outputs.append(out)
    return outputs


def _check_composition(whole: Tensor | None, composed: Tensor, name: str) -> None:
    if whole is None or whole.shape != composed.shape:
        got = "fails" if whole is None else f"gives {tuple(whole.shape)}"
        raise ModelError(
            f"the blocks of model '{name}', one after the other, give shape {tuple(composed.shape)}, but its"
            f" forward {got}; blocks() must return every part of forward(), in order"
        )
    if not torch.allclose(whole, composed, rtol=1e-4, atol=1e-5):
        difference = (whole - composed).abs().max().item()
        raise ModelError(
            f"the blocks of model '{name}', one after the other, differ from its forward by {difference:.3g};"
            " blocks() must return every part of forward(), in order (activations and reshapes too)"
        )


def _own_exits(module: nn.Module, blocks: list[str], name: str) -> dict[str, nn.Module] | None:
    own = getattr(module.whole if isinstance(module, SplitModel) else module, "exits", None)
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
