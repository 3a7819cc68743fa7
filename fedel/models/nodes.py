"""What the nodes of a network's graph read, use and give."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, fx, nn
from torch.utils.flop_counter import FlopCounterMode

from fedel.models.trace import Traced

_SIZES = {"size", "dim", "ndimension", "numel", "shape", "ndim", "dtype", "device"}
"""Methods and attributes of a tensor that say nothing about its values."""


class Recorder(fx.Interpreter):
    """Runs a graph and keeps what every node gave, of tensors the shape only, and how much work it was."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.root, graph=traced.graph)
        self.values: dict[fx.Node, Any] = {}
        self.work: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        with FlopCounterMode(display=False) as counter:
            given = super().run_node(n)
        self.values[n] = given.to("meta") if isinstance(given, Tensor) else given
        self.work[n] = counter.get_total_flops()
        if n.op == "call_module":
            # Not every kernel is counted, such as those of recurrent layers; weights are used at least once.
            self.work[n] += sum(p.numel() for p in self.fetch_attr(str(n.target)).parameters())
        return given


def free_of_values(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on weights and on sizes of the input, not on its values."""
    free: set[fx.Node] = set()
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if asks_for_size(node) or free.issuperset(node.all_input_nodes):
            free.add(node)
    return free


def asks_for_size(node: fx.Node) -> bool:
    return asked_for(node) in _SIZES


def asked_for(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return str(node.args[1]) if node.target is getattr else ""


def tied_places(traced: Traced, steps: Sequence[fx.Node], free: set[fx.Node]) -> dict[int, str]:
    """Places between two uses of the same tensor, and the name of its layer; place i is after step i."""
    used: dict[int, tuple[int, int, str]] = {}
    for i, step in enumerate(steps):
        for node in _with_free(step, free):
            for name, tensor in _tensors(traced.root, node):
                first, _, owner = used.get(id(tensor), (i, i, name))
                used[id(tensor)] = (first, i, owner)
    return {place: name for first, last, name in used.values() for place in range(first, last)}


def _with_free(step: fx.Node, free: set[fx.Node]) -> Iterator[fx.Node]:
    """A step, and the nodes that go with it into its block."""
    yield step
    for node in step.all_input_nodes:
        if node in free and not asks_for_size(node):
            yield from _with_free(node, free)


def _tensors(root: nn.Module, node: fx.Node) -> Iterator[tuple[str, Tensor]]:
    """What a node uses that is part of the model: weights and floating statistics."""
    if node.op == "call_module":
        module, name = root.get_submodule(str(node.target)), str(node.target)
        found = [*module.parameters(), *module.buffers()]
    elif node.op == "get_attr":
        name, found = str(node.target), [operator.attrgetter(str(node.target))(root)]
    else:
        return
    yield from ((name, t) for t in found if isinstance(t, Tensor) and t.is_floating_point())


def overwrites(step: fx.Node, node: fx.Node, root: nn.Module) -> bool:
    """Whether ``step`` overwrites what ``node`` gave."""
    if not step.args or step.args[0] is not node:
        return False
    if step.op == "call_module":
        return bool(getattr(root.get_submodule(str(step.target)), "inplace", False))
    if step.kwargs.get("inplace") is True:
        return True
    name = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def own_modes(block: fx.GraphModule) -> None:
    """Layers without tensors are often used again, such as a dropout; each block is in a mode of its own."""
    for node in block.graph.find_nodes(op="call_module"):
        layer = block.get_submodule(str(node.target))
        if not [*layer.parameters(), *layer.buffers()]:
            parent, _, name = str(node.target).rpartition(".")
            setattr(block.get_submodule(parent), name, copy.deepcopy(layer))


def common_path(names: Sequence[str]) -> str:
    """The module in which all of these are; if that is the whole network, its part with the first of them.

    >>> common_path(["layer1.0.conv1", "layer1.0.conv2"]), common_path(["layer1.0.conv1", "layer2.0.conv1"])
    ('layer1.0', 'layer1')
    """
    parts = [name.split(".") for name in names]
    common = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in common) or parts[0][0]


def inside_of(node: fx.Node) -> set[str]:
    """The submodules inside which a node runs."""
    return {str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()}


def output_of(node: fx.Node) -> str:
    return "the input" if node.op == "placeholder" else f"the output of {called(node)}"


def called(node: fx.Node) -> str:
    """What a node is in the user's code."""
    if node.op == "call_module":
        return f"'{node.target}'"
    if node.op == "placeholder":
        return "the input"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    inside = max(inside_of(node), key=len, default="")
    return f"{name}() in '{inside}'" if inside else f"{name}() in forward"
