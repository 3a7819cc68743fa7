"""A model set up for one elastic training: what is frozen costs nothing (paper, sections 4.2 and 4.3).

Blocks below the window run without gradient, blocks beyond the deepest exit do not run, and gradients are
computed only for what is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedel.errors import ModelError
from fedel.models.blocks import BlockModel
from fedel.types import Role

Norm = nn.modules.batchnorm._BatchNorm
Conv = nn.modules.conv._ConvNd


class BiasGradient(torch.autograd.Function):
    """Gives a bias its gradient where its value is in ``y`` already.

    For the gradient of a bias only, a convolution's backward on a CPU computes that of the whole kernel too.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:  # noqa: ARG004
        # Marked as changed in place, so that an in-place activation may follow.
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor]:
        (gradient,) = gradients
        # Over the batch first: several times faster than both sums at once where images are small.
        return gradient if ctx.needs_input_grad[0] else None, gradient.flatten(2).sum(0).sum(1)


@dataclass(frozen=True)
class Elastic:
    """A model inside ``elastic``."""

    model: BlockModel
    end: int
    exits: tuple[int, ...]
    trained: Mapping[str, Tensor]
    """The leaves to optimise, in forward order; updating one in place updates the model."""
    detached: bool = False
    """Losses at exits but the last one do not reach the blocks."""

    def logits(self, x: Tensor) -> list[Tensor]:
        """Logits at every exit used."""
        return self.window_logits(self.entrance(x))

    def entrance(self, x: Tensor) -> Tensor:
        """What enters the window: the output of block ``end - 1``, which is frozen."""
        with torch.no_grad():
            return self.model.run(x, 1, self.end - 1)

    def window_logits(self, h: Tensor) -> list[Tensor]:
        """The same from what enters the window."""
        found, first = [], self.end
        for block in self.exits:
            h = self.model.run(h, first, block)
            inner = self.detached and block != self.exits[-1]
            found.append(self.model.exit(block, h.detach() if inner else h))
            first = block + 1
        return found

    def norms(self) -> list[Norm]:
        """Batch-norm layers that train: in the window and in the exits used."""
        return [
            m
            for part in _parts(self.model, self.end, self.exits)
            for m in part.modules()
            if isinstance(m, Norm)
        ]


@contextmanager
def elastic(
    model: BlockModel,
    selected: Collection[str],
    exits: Collection[int],
    end: int = 1,
    *,
    track_statistics: bool = True,
    after_layer: Mapping[nn.Module, Callable[[Tensor], Tensor]] | None = None,
    split_bias: bool = True,
    detached: bool = False,
) -> Iterator[Elastic]:
    """Set modes, gradients and torch's hooks; afterwards the model is in evaluation mode without them.

    ``after_layer`` maps a layer to what its output goes through while training; ``detached`` is that of the
    ``TrainSpec``.
    """
    exits = tuple(sorted(exits))
    _check(model, selected, exits, end)
    names = [
        t.name for t in model.spec.tensors if t.name in selected or (t.role is Role.EXIT and t.block in exits)
    ]
    model.eval().requires_grad_(False)
    for part in _parts(model, end, exits):
        part.train()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_hook(lambda _m, _x, y, change=change: change(y))
        for layer, change in (after_layer or {}).items()
    ]
    for name in names:
        kernel = name.removesuffix("bias") + "weight"
        layer = model.get_submodule(name.rpartition(".")[0])
        if split_bias and isinstance(layer, Conv) and name.endswith(".bias") and kernel not in names:
            trained[name] = alias = parameters[name].detach().requires_grad_()
            handles.append(layer.register_forward_hook(partial(_add_bias_gradient, alias)))
        else:
            trained[name] = parameters[name].requires_grad_()
    net = Elastic(model, end, exits, trained, detached)
    tracking = {norm: norm.track_running_stats for norm in net.norms()}
    for norm in tracking:
        # Batch norm in training mode uses batch statistics either way; this keeps the running ones still.
        norm.track_running_stats = tracking[norm] and track_statistics
        if norm.num_batches_tracked is not None:
            # The count is not exchanged; left over from before it would weigh in cumulative averages.
            norm.num_batches_tracked.zero_()
    try:
        yield net
    finally:
        for norm, was in tracking.items():
            norm.track_running_stats = was
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
        model.eval().requires_grad_(False)


def _add_bias_gradient(bias: Tensor, _layer: nn.Module, _inputs: object, y: Tensor) -> Tensor:
    given: Tensor = BiasGradient.apply(y, bias)  # type: ignore[no-untyped-call]
    return given


def useful_exits(model: BlockModel, selected: Collection[str], exits: Collection[int]) -> tuple[int, ...]:
    """On a frozen trunk an exit whose head is not trained has nothing to learn: it need not run."""
    if not model.spec.exit_each:
        return tuple(sorted(exits))
    blocks = {model.spec.by_name[name].block for name in selected}
    return tuple(sorted(b for b in exits if b in blocks)) or (max(exits),)


def _parts(model: BlockModel, end: int, exits: Collection[int]) -> list[nn.Module]:
    names = model.block_names
    blocks = [model.blocks[name] for name in names[end - 1 : max(exits)]]
    return blocks + [model.exits[names[b - 1]] for b in exits if names[b - 1] in model.exits]


def _check(model: BlockModel, selected: Collection[str], exits: tuple[int, ...], end: int) -> None:
    spec = model.spec
    if not exits or not 1 <= end <= exits[0] or exits[-1] > spec.num_blocks:
        raise ModelError(
            f"a training of {spec.name} goes from block {end} to the exits {exits}; it needs at least one exit,"
            f" none below its first block, and blocks 1 to {spec.num_blocks}"
        )
    for name in selected:
        tensor = spec.by_name.get(name)
        if tensor is None or tensor.role is not Role.WEIGHT or not end <= tensor.block <= exits[-1]:
            raise ModelError(
                f"tensor '{name}' was selected but is not a weight of {spec.name} in blocks {end} to"
                f" {exits[-1]}; choose from spec.weights_in(end, front)"
            )
