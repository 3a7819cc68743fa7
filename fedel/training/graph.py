"""Where the time of a backward pass goes: a stamp after every node of the autograd graph, as it really runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedel.training.clock import Stamp, seconds_between, stamp

BEFORE_ALL = -1
"""Owner of operations that run ahead of the first layer with weights."""


@dataclass
class Spans:
    """Which numbers of autograd nodes each layer made in its forward pass; layers in order of execution."""

    layers: list[tuple[int, int, int]] = field(default_factory=list)
    """(index of the layer, first number, number after the last)."""

    def owner(self, number: int) -> tuple[int, bool]:
        """The layer a node belongs to, and whether it is the layer's own or followed it."""
        nearest, distance = (BEFORE_ALL, False), -1
        for index, first, after in self.layers:
            if first <= number < after:
                return index, True
            if distance < after <= number:
                nearest, distance = (index, False), after
        return nearest


@contextmanager
def record_spans(layers: Sequence[nn.Module]) -> Iterator[Spans]:
    spans, begun = Spans(), {}

    def begin(index: int, _layer: nn.Module, _inputs: object) -> None:
        begun[index] = _next_number()

    def finish(index: int, _layer: nn.Module, _inputs: object, _output: object) -> None:
        spans.layers.append((index, begun[index], _next_number()))

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(partial(begin, index)))
        handles.append(layer.register_forward_hook(partial(finish, index)))
    try:
        yield spans
    finally:
        for handle in handles:
            handle.remove()


def timed_backward(
    output: Tensor, gradient: Tensor, spans: Spans, device: torch.device
) -> Mapping[tuple[int, bool], float]:
    """Run the backward pass of ``output``; seconds of each layer itself and of what followed it.

    A node is charged from the end of the one before it, so that the figures add up to the whole.
    """
    if not output.requires_grad:
        return {}
    ends: list[tuple[int, Stamp]] = []
    handles = [
        node.register_hook(lambda *_, number=number: ends.append((number, stamp(device))))
        for number, node in _nodes(output)
    ]
    last = stamp(device)
    torch.autograd.backward(output, gradient)
    finish = stamp(device)
    for handle in handles:
        handle.remove()
    seconds: dict[tuple[int, bool], float] = {}
    if ends:
        ends[-1] = (ends[-1][0], finish)
    for number, end in ends:
        owner = spans.owner(number)
        seconds[owner] = seconds.get(owner, 0.0) + seconds_between(last, end)
        last = end
    return seconds


def _next_number() -> int:
    with torch.enable_grad():
        node: Any = torch.empty(0, requires_grad=True).view(0).grad_fn
    return int(node._sequence_nr())


def _nodes(output: Tensor) -> Iterator[tuple[int, Any]]:
    """Every operation behind ``output``; not the leaves, which only take a gradient over."""
    waiting: list[Any] = [output.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name().endswith("AccumulateGrad"):
            continue
        seen.add(node)
        yield int(node._sequence_nr()), node
        waiting.extend(parent for parent, _ in node.next_functions)
