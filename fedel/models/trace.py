"""What a network computes, as a graph of torch.fx: for networks that do not list their blocks.

Layers of torch.nn stay whole, and so do modules into which torch.fx cannot look. ``forward`` is followed twice,
for training and for testing; where the two differ in a number or a switch, such as that of
``F.dropout(x, training=self.training)``, the graph chooses when it runs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

MODE = "fedel_by_mode"
"""The name of the module in a graph that chooses between training and testing."""
_MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros")
"""Functions of torch that make a tensor of a given size; torch.fx does not follow these by itself."""

_ONE_AT_A_TIME = threading.Lock()
"""While torch.fx follows a forward, all calls of modules in the process go through it."""


class CannotTrace(Exception):
    """Why a forward cannot be followed, in words."""


class ByMode(nn.Module):
    """One of two values, as the network is in training or not."""

    def forward(self, training: Any, testing: Any) -> Any:
        return training if self.training else testing


@dataclass(frozen=True)
class Traced:
    """A network and its graph."""

    root: nn.Module
    """Shares all layers with the network, and has in addition what the graph needs."""
    graph: fx.Graph
    unseen: dict[str, str]
    """Modules of the user's own that stay whole because they cannot be followed, and why."""


def trace(module: nn.Module) -> Traced:
    """The graph of ``module``; raises CannotTrace."""
    # torch.fx leaves constants on the module that it follows: those stay on a copy that shares the layers.
    root = copy.copy(module)
    root._modules = dict(module._modules)
    root.__class__ = _of_one_input(type(module))
    unseen: dict[nn.Module, str] = {}
    with dry_run(root):
        _followed(root.train(), unseen)
        testing = _followed(root.eval(), unseen)
        # Once more, as following it for testing may have found more that stays whole.
        training = _followed(root.train(), unseen)
    root.add_module(MODE, ByMode())
    _merge(training, testing)
    names = {m: n for n, m in root.named_modules()}
    return Traced(root, training, {names[m]: why for m, why in unseen.items()})


@contextmanager
def dry_run(module: nn.Module) -> Iterator[None]:
    """Without gradients and in evaluation mode, so that no batch-norm statistic moves."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for m, training in modes:
            m.training = training


def _of_one_input(its_class: type[nn.Module]) -> type[nn.Module]:
    """The same class with all arguments of ``forward`` after the first at their defaults."""

    def forward(self: nn.Module, x: Tensor) -> Any:
        return its_class.forward(self, x)

    return type(its_class.__name__, (its_class,), {"forward": forward})


def _followed(root: nn.Module, unseen: dict[nn.Module, str]) -> fx.Graph:
    """A module that cannot be followed stays whole, and the next try looks around it."""
    while True:
        try:
            with _ONE_AT_A_TIME, _recorded_makers():
                return _Tracer(set(unseen)).trace(root)
        except _Unseen as problem:
            unseen[problem.module] = _in_words(problem.reason)
        except Exception as problem:  # whatever the user's forward raises when it gets no real tensor
            raise CannotTrace(f"its forward cannot be followed: {_in_words(problem)}") from problem


class _Unseen(Exception):
    def __init__(self, module: nn.Module, reason: Exception) -> None:
        super().__init__(str(reason))
        self.module, self.reason = module, reason


class _Tracer(fx.Tracer):
    def __init__(self, whole: set[nn.Module]) -> None:
        super().__init__()
        self._whole, self._thread = whole, threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m in self._whole:
            return True
        if isinstance(m, nn.TransformerEncoder):
            return False
        return super().is_leaf_module(m, module_qualified_name) or _is_one_layer(m)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:  # another thread uses a model of its own
            return forward(*args, **kwargs)
        if self.is_leaf_module(m, self.path_of_module(m)):
            return super().call_module(m, forward, args, kwargs)
        if isinstance(m, nn.TransformerEncoder):
            forward = _EncoderLayers(m)
        try:
            return super().call_module(m, forward, args, kwargs)
        except _Unseen:
            raise
        except Exception as problem:  # as above; here a smaller part than the whole forward is to blame
            raise _Unseen(m, problem) from problem


@dataclass(frozen=True)
class _EncoderLayers:
    """torch's encoder as its layers one after the other; its own forward asks for more than a graph knows."""

    encoder: nn.TransformerEncoder

    def __call__(
        self,
        src: Any,
        mask: Any = None,
        src_key_padding_mask: Any = None,
        is_causal: bool | None = None,
    ) -> Any:
        for layer in self.encoder.layers:
            src = layer(
                src, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=bool(is_causal)
            )
        return src if self.encoder.norm is None else self.encoder.norm(src)


def _is_one_layer(module: nn.Module) -> bool:
    """A layer that the user wrote: it has weights of its own, and nothing inside it has others."""
    own = next(module.parameters(recurse=False), None) is not None
    return own and all(next(child.parameters(), None) is None for child in module.children())


@contextmanager
def _recorded_makers() -> Iterator[None]:
    kept = {name: getattr(torch, name) for name in _MAKERS}
    for name, original in kept.items():
        setattr(torch, name, _Recorded(original))
    try:
        yield
    finally:
        for name, original in kept.items():
            setattr(torch, name, original)


@dataclass(frozen=True)
class _Recorded:
    """A function that becomes part of the graph if one of its arguments is known only when the graph runs."""

    original: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found: list[fx.Proxy] = []
        fx.node.map_aggregate((args, kwargs), lambda a: found.append(a) if isinstance(a, fx.Proxy) else None)
        if not found:
            return self.original(*args, **kwargs)
        return found[0].tracer.create_proxy("call_function", self.original, args, kwargs)


def _merge(training: fx.Graph, testing: fx.Graph) -> None:
    """Put a choice into the first graph wherever the second has another value."""
    pairs = list(zip(training.nodes, testing.nodes, strict=False))
    same = {other: one for one, other in pairs}
    if len(training.nodes) != len(testing.nodes) or not all(_same_call(one, other) for one, other in pairs):
        raise CannotTrace("its forward does other things in training than in testing")
    for one, other in pairs:
        with training.inserting_before(one):
            one.args = _chosen(training, one.args, other.args, same)
            one.kwargs = _chosen(training, one.kwargs, other.kwargs, same)


def _same_call(one: fx.Node, other: fx.Node) -> bool:
    constants = all(str(node.target).startswith("_tensor_constant") for node in (one, other))
    return one.op == other.op and (one.target == other.target or (one.op == "get_attr" and constants))


def _chosen(graph: fx.Graph, one: Any, other: Any, same: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(other, fx.Node):
        other = same[other]
    if isinstance(one, tuple | list) and type(one) is type(other) and len(one) == len(other):
        return type(one)([_chosen(graph, a, b, same) for a, b in zip(one, other, strict=True)])
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {key: _chosen(graph, one[key], other[key], same) for key in one}
    if isinstance(one, slice) and isinstance(other, slice):
        ends = ((one.start, other.start), (one.stop, other.stop), (one.step, other.step))
        return slice(*(_chosen(graph, a, b, same) for a, b in ends))
    if one is other or (not isinstance(one, Tensor) and one == other):
        return one
    return graph.call_module(MODE, (one, other))


def _in_words(problem: Exception) -> str:
    """The first line of what torch.fx says; its frequent complaint about an ``if`` is put in plainer words."""
    if isinstance(problem, fx.proxy.TraceError) and "control flow" in str(problem):
        return "an `if`, `while` or `assert` in it asks for values or sizes of a tensor"
    text = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {text[0] if text else 'no message'}"
