"""Training steps taken apart by the clock; the raw material of a timing profile (paper, section 4.1).

Nothing is measured by itself: blocks run in their order with a cut between them, and every autograd node
is stamped as it ends, so caches and allocators are in the state they have in training.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedel.models.blocks import BlockModel
from fedel.training import optim
from fedel.training.clock import Stamp, seconds_between, stamp, timed
from fedel.training.elastic import Elastic, elastic
from fedel.training.graph import record_spans, timed_backward
from fedel.training.objective import objective
from fedel.types import LocalWork, TensorSpec

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Layer:
    """A layer with weights of its own."""

    module: nn.Module
    tensors: tuple[TensorSpec, ...]

    @property
    def carrier(self) -> str:
        """The tensor that carries the way through: a kernel, or a norm's last tensor as in ElasticTrainer."""
        return self.tensors[-1 if isinstance(self.module, _NORMS) else 0].name


@dataclass(frozen=True)
class Part:
    """Backward of a layer itself (``own``), or of what followed it, in a step with some of the gradients."""

    asked: int | str
    """Which tensors of each layer get a gradient: the one at this place, ``ALL`` or ``NONE`` of them."""
    block: int
    layer: int
    own: bool


ALL, NONE = "all", "none"
Key = tuple[Hashable, ...]


@dataclass
class Samples:
    """Repeated measurements by key; the median is what counts on a machine that others use too."""

    values: dict[Hashable, list[float]] = field(default_factory=dict)

    def add(self, key: Hashable, seconds: float) -> None:
        self.values.setdefault(key, []).append(seconds)

    def median(self, key: Hashable) -> float:
        return statistics.median(self.values[key]) if key in self.values else 0.0

    def parts(self, asked: int | str) -> dict[Part, float]:
        return {k: self.median(k) for k in self.values if isinstance(k, Part) and k.asked == asked}


class Bench:
    """One model, one batch; ``measure`` takes one sample of everything."""

    def __init__(self, model: BlockModel, x: Tensor, y: Tensor, work: LocalWork, device: torch.device) -> None:
        self.model, self.x, self.y = model, x.to(device), y.to(device)
        self.work, self.device = work, device
        self.spec = model.spec
        self.exits = self.spec.exits_for(1, self.spec.num_blocks)
        self.layers = layers_with_weights(model)
        # Tokens have no gradient; the way through is measured up to the first tensor then.
        self.gradient_from_input = self.x.is_floating_point() or self.spec.exit_each
        self.samples = Samples()

    def measure(self, narrowed: Mapping[float, BlockModel], fetch: Callable[[], object] | None) -> None:
        """Interleaved, so that a slow moment of the machine hits all alike."""
        self._whole_step(1.0, self.model)
        most = max(len(layer.tensors) for layer in self.layers)
        for asked in (NONE, *range(most), ALL):
            self._stamped_step(asked)
        self._frozen_forward()
        if not self.spec.exit_each:
            self._exits()
        for width, model in narrowed.items():
            self._whole_step(width, model)
        if fetch:
            self.samples.add("fetch", timed(self.device, fetch))

    def _whole_step(self, width: float, model: BlockModel) -> None:
        """An ordinary training step of everything; its blocks are what the parts have to add up to."""
        with elastic(model, [t.name for t in model.spec.weights], self.exits) as net:
            optimiser = optim.build(net.trained.values(), self.work)
            self._marks(net, optimiser)  # allocates gradients and the optimiser's state
            (_, last), *marks = self._marks(net, optimiser)
            for key, mark in marks:
                self.samples.add((width, *key), seconds_between(last, mark))
                last = mark
            smallest = optim.build([min(net.trained.values(), key=Tensor.numel)], self.work)
            smallest.step()
            self.samples.add((width, "bare optimiser"), timed(self.device, smallest.step))

    def _marks(self, net: Elastic, optimiser: optim.Optimiser) -> list[tuple[Key, Stamp]]:
        """When each phase of a step ended; the first mark is the beginning."""
        marks: list[tuple[Key, Stamp]] = []

        def mark(*key: Hashable) -> None:
            marks.append((key, stamp(self.device)))

        mark("begin")
        h, logits = self.x, []
        for block in range(1, self.spec.num_blocks + 1):
            h = net.model.run(h, block, block)
            mark("forward", block)
            if h.requires_grad and block < self.spec.num_blocks:
                # The gradient of what a block gave is there once the next block's backward is done.
                h.register_hook(  # type: ignore[no-untyped-call]
                    lambda _, block=block: mark("backward", block + 1)
                )
            if block in net.exits:
                logits.append(net.model.exit(block, h))
                mark("exit forward", block)
        gradients = self._loss_gradients(*logits)
        optimiser.zero_grad()
        mark("loss")
        torch.autograd.backward(logits, gradients)
        mark("backward", 1)
        optimiser.step()
        mark("optimiser")
        return marks

    def _stamped_step(self, asked: int | str) -> None:
        """Forward block by block, backward node by node."""
        selected = [
            t.name for layer in self.layers for place, t in enumerate(layer.tensors) if asked in (ALL, place)
        ]
        if asked == NONE and not self.gradient_from_input:
            selected = [self.spec.weights[0].name]
        modules = [layer.module for layer in self.layers]
        with elastic(self.model, selected, self.exits), record_spans(modules) as spans:
            gradient: Tensor | None = None
            for block, entrance, output in reversed(self._forward_pieces()):
                if gradient is None or self.spec.exit_each:
                    begin = stamp(self.device)
                    (gradient,) = self._loss_gradients(output)
                    self.samples.add(("loss", block), seconds_between(begin, stamp(self.device)))
                for (layer, own), seconds in timed_backward(output, gradient, spans, self.device).items():
                    if asked != NONE or self.gradient_from_input or (layer, own) != (0, True):
                        self.samples.add(Part(asked, block, layer, own), seconds)
                gradient = entrance.grad

    def _forward_pieces(self) -> list[tuple[int, Tensor, Tensor]]:
        """(block, its entrance, its output) of every block, or of every exit on a frozen trunk."""
        pieces, h = [], self.x
        for block in range(1, self.spec.num_blocks + 1):
            entrance, inside = cut(h)
            if self.spec.exit_each:
                with torch.no_grad():
                    h = self.model.run(inside, block, block)
                entrance, inside = cut(h)
                pieces.append((block, entrance, self.model.exit(block, inside)))
            else:
                h = self.model.run(inside, block, block)
                pieces.append((block, entrance, h))
        return pieces

    def _exits(self) -> None:
        """Forward and backward of every exit, on the activations it would see."""
        h = self.x
        for block in range(1, self.spec.num_blocks):
            with torch.no_grad():
                h = self.model.run(h, block, block)
            with elastic(self.model, (), (block,)):
                _, inside = cut(h)
                begin = stamp(self.device)
                logits = self.model.exit(block, inside)
                self.samples.add((1.0, "exit forward", block), seconds_between(begin, stamp(self.device)))
                (gradient,) = self._loss_gradients(logits)
                seconds = timed(self.device, partial(torch.autograd.backward, logits, gradient))
                self.samples.add(("exit backward", block), seconds)

    def _frozen_forward(self) -> None:
        """Every block as it runs below a window."""
        self.model.eval()
        h, marks = self.x, [stamp(self.device)]
        with torch.no_grad():
            for block in range(1, self.spec.num_blocks + 1):
                h = self.model.run(h, block, block)
                marks.append(stamp(self.device))
        for block, (begin, end) in enumerate(pairwise(marks), start=1):
            self.samples.add(("frozen forward", block), seconds_between(begin, end))

    def _loss_gradients(self, *logits: Tensor) -> list[Tensor]:
        detached = [z.detach().requires_grad_() for z in logits]
        return list(torch.autograd.grad(objective(detached, self.y)[0], detached))


def layers_with_weights(model: BlockModel) -> list[Layer]:
    owned: dict[str, list[TensorSpec]] = {}
    for t in model.spec.weights:
        owned.setdefault(t.name.rpartition(".")[0], []).append(t)
    return [Layer(model.get_submodule(name), tuple(tensors)) for name, tensors in owned.items()]


def cut(h: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf that takes the gradient, and a copy to compute with that may be changed in place."""
    leaf = h.detach()
    if not leaf.is_floating_point():
        return leaf, leaf
    leaf = leaf.requires_grad_()
    return leaf, leaf.clone()
