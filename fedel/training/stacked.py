"""Several clients trained side by side, as one network whose convolutions have a group for each client.

A step of a narrow network is mostly the cost of calling small kernels. Side by side, clients pay it once.
Every tensor of a layer has the clients' values one after the other in its first dimension, and so have the
channels of what flows between layers: client k owns the k-th part of them. Sums are rounded differently than
in a training of one client.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedel.core.steps import effective_steps, least_samples, shortened
from fedel.data.dataset import IGNORE
from fedel.models.blocks import BlockModel
from fedel.models.exits import GridExit
from fedel.seeds import generator
from fedel.training import optim
from fedel.training.batches import batch_stream, to_torch
from fedel.training.clock import peak_memory_bytes, reset_peak_memory, seconds_between, stamp
from fedel.training.trainer import TorchTrainer
from fedel.types import Array, Patch, Role, Tensors, Trained, TrainSpec

Run = Callable[[Tensor], Tensor]
AS_THEY_ARE = (nn.ReLU, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Flatten)
"""Layers that treat every channel by itself, or keep the order of channels."""


@dataclass(frozen=True)
class Request:
    """What one client is to train."""

    trainer: TorchTrainer
    model: Tensors
    train_spec: TrainSpec

    @property
    def batch_size(self) -> int:
        return min(self.train_spec.work.batch_size, self.trainer.num_samples)

    def samples(self, batch: Array, num_done: int) -> Array:
        """Those of a step. All clients have as many, so the few of a short last step come several times: the
        mean over them, and what batch norm sees, hardly change by that."""
        spec = self.train_spec
        if num_done != spec.num_steps - 1 or spec.last_share == 1:
            return batch
        few = batch[: shortened(len(batch), spec.last_share, least_samples(self.trainer.spec))]
        return np.resize(few, len(batch))


def kind(request: Request) -> Hashable:
    """Requests of the same kind can be trained side by side; ``None`` where a client has to train alone."""
    spec, trainer = request.train_spec, request.trainer
    work = spec.work
    plain = spec.width == 1 and not (spec.static_norm or spec.hooks or spec.prefix_cache_bytes or spec.pace)
    if (
        not plain
        or not work.num_steps
        or work.clip_norm
        or trainer.data.kind == "text"
        or request.batch_size < 2
    ):
        return None
    if not all(_can_stack(layer) for layer in _layers(trainer.model, spec)):
        return None
    used = tuple(id(request.model[name]) for name in trainer.spec.tensors_for(spec.exits))
    return id(trainer.model), work, spec.exits, spec.detached, spec.end, request.batch_size, used


def train_together(requests: Sequence[Request]) -> list[Trained]:
    """The same trainings as one after the other; all requests are of one kind."""
    first = requests[0]
    trainer, exits = first.trainer, first.train_spec.exits
    trainer.model.load(first.model, exits)
    trainer.model.eval().requires_grad_(False)
    reset_peak_memory(trainer.device)
    begin = stamp(trainer.device)
    stack = _Stack(trainer.model, requests)
    found = stack.train()
    seconds = seconds_between(begin, stamp(trainer.device)) / len(requests)
    return [
        Trained(
            patches=patches,
            num_steps=request.train_spec.num_steps,
            effective_steps=effective_steps(request.train_spec.num_steps, request.train_spec.work),
            loss=loss,
            loss_square=square,
            seconds=seconds,
            peak_memory_bytes=peak_memory_bytes(trainer.device),
            last_share=request.train_spec.last_share,
        )
        for request, (patches, loss, square) in zip(requests, found, strict=True)
    ]


class _Stack:
    def __init__(self, model: BlockModel, requests: Sequence[Request]) -> None:
        self._model, self._requests = model, requests
        self._number = len(requests)
        spec = requests[0].train_spec
        self._exits, self._end, self._detached = tuple(sorted(spec.exits)), spec.end, spec.detached
        self._tensors: dict[str, Tensor] = {}
        """What changes: weights and statistics of all clients, one after the other."""
        self._blocks = {b: self._part(f"blocks.{name}") for b, name in self._named(self._end, self._exits[-1])}
        self._heads = {
            b: self._part(f"exits.{name}")
            for b, name in self._named(self._end, self._exits[-1])
            if b in self._exits and name in model.exits
        }
        self._own = [self._own_names(request.train_spec) for request in requests]
        trained = [name for name in self._tensors if any(name in own for own in self._own)]
        self._weights = {
            name: self._tensors[name].requires_grad_() for name in trained if self._is_weight(name)
        }
        self._still = list(self._keep_still())

    def train(self) -> list[tuple[dict[str, Patch], float, float]]:
        spec, number = self._requests[0].train_spec, self._number
        optimiser = optim.build(self._weights.values(), spec.work) if self._weights else None
        batches = self._entrances()
        losses: list[Tensor] = []
        squares = torch.zeros(number, dtype=torch.float64)
        results: dict[int, tuple[dict[str, Patch], float, float]] = {}
        for num_done in range(max(r.train_spec.num_steps for r in self._requests) + 1):
            for k, request in enumerate(self._requests):
                if request.train_spec.num_steps == num_done:
                    loss = float(torch.stack(losses)[:, k].double().mean()) if losses else 0.0
                    results[k] = self._patches(k), loss, float(squares[k])
            if len(results) == number:
                return [results[k] for k in range(number)]
            h, y = next(batches)
            total, each = self._loss(h, y)
            if optimiser is not None:
                optimiser.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                self._hold_still()
            squared = each.double().square().mean(0)
            for k, request in enumerate(self._requests):
                if num_done < max(1, -(-request.trainer.num_samples // request.batch_size)):
                    squares[k] = 0.8 * squares[k] + 0.2 * squared[k] if num_done else squared[k]
            losses.append(each.mean(0))
        raise AssertionError("every client has a number of steps")

    def _loss(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of the clients' losses, and each sample's mean over the exits, (N, clients)."""
        found, first = [], self._end
        counted = (y != IGNORE).sum(0).clamp(min=1)
        for block in self._exits:
            for b in range(first, block + 1):
                h = self._blocks[b](h)
            out = h.detach() if self._detached and block != self._exits[-1] else h
            logits = self._heads[block](out) if block in self._heads else out
            logits = logits.view(*y.shape, -1)
            found.append(
                F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORE)
            )
            first = block + 1
        each = [one.view_as(y) for one in found]
        total = torch.stack([(one.sum(0) / counted).sum() for one in each]).sum()
        return total, torch.stack([one.detach() for one in each]).mean(0)

    def _entrances(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What enters the window: (N, clients x channels, ...), and targets (N, clients)."""
        streams = []
        for request in self._requests:
            rng = generator(request.train_spec.seed, "batches")
            streams.append((batch_stream(request.trainer.indices, request.train_spec.work, rng), rng))
        device, number = self._requests[0].trainer.device, self._number
        for num_done in itertools.count():
            pairs = [
                request.trainer.data.train_batch(request.samples(next(stream), num_done), rng)
                for request, (stream, rng) in zip(self._requests, streams, strict=True)
            ]
            x, y = (np.concatenate([pair[i] for pair in pairs]) for i in (0, 1))
            h, target = to_torch((x, y), device, "fast")
            with torch.no_grad():
                h = self._model.run(h, 1, self._end - 1)
            each = h.view(number, -1, *h.shape[1:]).transpose(0, 1).flatten(1, 2)
            if each.ndim == 4:
                each = each.contiguous(memory_format=torch.channels_last)
            yield each, target.view(number, -1).t().contiguous()

    def _part(self, name: str) -> Run:
        """A block or an exit for all clients."""
        runs = [self._layer(layer, place) for place, layer in _leaves(self._model.get_submodule(name), name)]

        def run(h: Tensor) -> Tensor:
            for each in runs:
                h = each(h)
            return h

        return run

    def _layer(self, layer: nn.Module, name: str) -> Run:
        number = self._number
        values = {
            n: self._repeat(f"{name}.{n}", t) for n, t in (*layer.named_parameters(), *layer.named_buffers())
        }
        weight, bias = values.get("weight"), values.get("bias")
        if isinstance(layer, nn.Conv2d):
            how = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
            return lambda h: F.conv2d(h, weight, bias, groups=number, **how)  # type: ignore[arg-type]
        if isinstance(layer, nn.BatchNorm2d):
            mean, variance = values["running_mean"], values["running_var"]
            momentum, eps = layer.momentum or 0.0, layer.eps
            return lambda h: F.batch_norm(h, mean, variance, weight, bias, True, momentum, eps)
        if isinstance(layer, nn.Linear):
            assert weight is not None
            shape = (number, *layer.weight.shape)

            def linear(h: Tensor) -> Tensor:
                # A view that was made before the weight needs a gradient would have none: so in every step.
                offsets = weight.new_zeros(1) if bias is None else bias.view(number, 1, -1)
                each = h.view(len(h), number, -1).transpose(0, 1)
                return (
                    torch.baddbmm(offsets, each, weight.view(shape).transpose(1, 2)).transpose(0, 1).flatten(1)
                )

            return linear
        return layer

    def _repeat(self, name: str, value: Tensor) -> Tensor:
        if value.ndim == 0:
            return value
        self._tensors[name] = value.detach().repeat(self._number, *(1,) * (value.ndim - 1))
        return self._tensors[name]

    def _own_names(self, spec: TrainSpec) -> set[str]:
        heads = {t.name for t in self._model.spec.tensors if t.role is Role.EXIT and t.block in self._exits}
        return (set(spec.selected) | heads) & self._tensors.keys()

    def _is_weight(self, name: str) -> bool:
        return self._model.spec.by_name[name].role is not Role.BUFFER

    def _keep_still(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Weights that some clients train and others do not: the places of the others, and their values."""
        for name, weight in self._weights.items():
            others = [k for k, own in enumerate(self._own) if name not in own]
            if others:
                rows = weight.detach().view(self._number, -1)
                places = torch.tensor(others, device=weight.device)
                yield rows, places, rows[places].clone()

    @torch.no_grad()
    def _hold_still(self) -> None:
        for rows, places, values in self._still:
            rows.index_copy_(0, places, values)

    def _patches(self, k: int) -> dict[str, Patch]:
        """What client ``k`` trained, and its statistics."""
        patches = {}
        for t in self._model.spec.tensors:
            if t.name in self._own[k] or (t.role is Role.BUFFER and t.name in self._tensors):
                rows = self._tensors[t.name].detach().view(self._number, *t.shape)
                patches[t.name] = Patch(rows[k].cpu().numpy().copy())
        return patches

    def _named(self, first: int, last: int) -> Iterator[tuple[int, str]]:
        return ((b, self._model.block_names[b - 1]) for b in range(first, last + 1))


def _leaves(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    if type(module) in (nn.Sequential, GridExit):
        for child, inner in module.named_children():
            yield from _leaves(inner, f"{name}.{child}")
    else:
        yield name, module


def _layers(model: BlockModel, spec: TrainSpec) -> Iterator[nn.Module]:
    names = model.block_names
    parts = [model.blocks[name] for name in names[spec.end - 1 : max(spec.exits)]]
    parts += [model.exits[names[b - 1]] for b in spec.exits if names[b - 1] in model.exits]
    return (layer for part in parts for _, layer in _leaves(part, ""))


def _can_stack(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros"
    if type(layer) is nn.BatchNorm2d:
        return layer.affine and layer.track_running_stats and layer.momentum is not None
    return type(layer) in (nn.Linear, *AS_THEY_ARE)
