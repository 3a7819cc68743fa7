"""A profile that is counted, not measured: seconds in proportion to the multiplications of each layer.

The same on every machine, and however busy it is. A layer costs its multiplications forward, once more for the
gradient of its input and once more for that of its weights; a bias, a norm or an embedding costs one for each
value that it puts out. Real kernels differ: small ones are slower than this says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from fedel.core.timing import full_step
from fedel.errors import ModelError, ProfileError
from fedel.models.blocks import BlockModel
from fedel.types import BlockTime, TensorTime, TimingProfile, WidthTime

SECONDS = 1e-9
"""Of one multiplication. Only ratios of times mean anything."""


def flops_profile(model: BlockModel, x: Tensor, batch_size: int, widths: Sequence[float] = ()) -> TimingProfile:
    """The profile of a step of ``batch_size`` samples, counted on the samples in ``x``.

    ``widths`` are those of narrowed models, counted too; a model that cannot be narrowed has none.
    """
    each = batch_size * SECONDS / len(x)
    counts = _count(model, x)
    last_of_block = {t.block: t.name for t in model.spec.weights}
    tensors = []
    for t in model.spec.weights:
        layer, _, part = t.name.rpartition(".")
        if layer not in counts.layers:
            kind = type(model.get_submodule(layer)).__name__
            raise ProfileError(
                f"[fleet] base = 'flops' cannot count {kind} '{layer}', which holds the tensor '{t.name}': it"
                " knows layers with one weight, such as Linear and Conv2d; set base to 'measured'"
            )
        found = counts.layers[layer]
        kernel = part == "weight" and found.multiplications > 0
        update = found.multiplications if kernel else found.values
        through = found.multiplications if kernel else found.values if found.is_norm and part == "bias" else 0
        if t.name == last_of_block[t.block] and not model.spec.exit_each:
            through += counts.through[t.block - 1]
        tensors.append(TensorTime(t.name, t.block, through * each, update * each))
    blocks = tuple(
        BlockTime(forward * each, exit * each, 2 * exit * each if not model.spec.exit_each else 0.0)
        for forward, exit in zip(counts.blocks, counts.exits, strict=True)
    )
    return TimingProfile(
        device="counted",
        model=model.spec.name,
        batch_size=batch_size,
        tensors=tuple(tensors),
        blocks=blocks,
        widths=tuple(_widths(model, x, batch_size, widths)),
        source="counted multiplications, a nanosecond each",
    )


def _widths(model: BlockModel, x: Tensor, batch_size: int, widths: Sequence[float]) -> Iterator[WidthTime]:
    for width in widths:
        try:
            narrow, _ = model.narrow(width)
        except ModelError:
            return
        cost = full_step(flops_profile(narrow, x, batch_size), model.spec.exit_each)
        yield WidthTime(width, cost.forward_seconds, cost.backward_seconds)


@dataclass
class _Layer:
    multiplications: int = 0
    """With its kernel; 0 if it has none."""
    values: int = 0
    """That it puts out."""
    is_norm: bool = False


@dataclass
class _Counts:
    layers: dict[str, _Layer] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    """Multiplications forward of each block."""
    exits: list[int] = field(default_factory=list)
    through: list[int] = field(default_factory=list)
    """Of each block, what the gradient passes that belongs to no tensor that trains, such as attention."""


def _count(model: BlockModel, x: Tensor) -> _Counts:
    counts, trained = _Counts(), {t.name for t in model.spec.weights}
    with torch.no_grad(), _counting(model, counts):
        for name in model.block_names:
            x, forward = _counted(model.blocks[name], x)
            mine = {key: layer for key, layer in counts.layers.items() if key.startswith(f"blocks.{name}.")}
            kernels = sum(layer.multiplications for layer in mine.values())
            frozen = sum(v.multiplications for k, v in mine.items() if f"{k}.weight" not in trained)
            norms = sum(layer.values for layer in mine.values() if layer.is_norm)
            counts.blocks.append(forward + norms)
            counts.through.append(frozen + 2 * (forward - kernels))
            counts.exits.append(_counted(model.exits[name], x)[1] if name in model.exits else 0)
    return counts


def _counted(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    # The counter knows products of matrices, not every fused kernel for attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        y: Tensor = module(x)
    return y, counter.get_total_flops() // 2  # an addition with each multiplication


@contextmanager
def _counting(model: BlockModel, counts: _Counts) -> Iterator[None]:
    def count(name: str, layer: nn.Module, y: Tensor) -> None:
        found, weight = counts.layers.setdefault(name, _Layer()), layer.weight
        assert isinstance(weight, Tensor)
        if weight.ndim > 1 and not isinstance(layer, nn.Embedding):
            found.multiplications += y.numel() * weight[0].numel()
        found.is_norm = weight.ndim == 1
        found.values += y.numel()

    was_training = model.training
    handles = [
        layer.register_forward_hook(lambda m, _x, y, name=name: count(name, m, y))
        for name, layer in model.named_modules()
        if isinstance(getattr(layer, "weight", None), Tensor)
    ]
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
