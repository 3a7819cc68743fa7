"""Cuts a network into blocks where exactly one tensor goes on; layers and their names stay the user's own."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.flop_counter import FlopCounterMode

from fedel.config import nearest
from fedel.errors import ModelError
from fedel.models.trace import CannotTrace, Traced, dry_run, trace

JOINS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.PReLU)
"""Layers that have weights and yet join the block before: a conv and its norm are cut nowhere between."""
_SIZES = {"size", "dim", "ndimension", "numel", "shape", "ndim", "dtype", "device"}
"""Methods and attributes of a tensor that say nothing about its values."""
_MOST_WORK, _MANY_LAYERS = 0.8, 4
"""A block of this many layers that has more than this share of the work leaves nothing to slide over."""


class SplitModel(nn.Module):
    """A network with ``blocks()``: the same layers under the same names, and the same forward."""

    whole: nn.Module
    """The network itself."""

    def __init__(
        self, whole: nn.Module, at: Sequence[str], num_blocks: int, sample_input: Tensor | None
    ) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = whole._parameters, whole._buffers, whole._modules
        object.__setattr__(self, "whole", whole)  # not as a layer: every tensor would have a second name
        self._at, self._num_blocks, self._sample_input = tuple(at), num_blocks, sample_input

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole(*args, **kwargs)

    def train(self, mode: bool = True) -> SplitModel:
        self.whole.train(mode)
        self.training = mode
        return self

    def blocks(self, sample_input: Tensor | None = None) -> dict[str, nn.Module]:
        """The blocks by name; ``sample_input`` is a batch of the data, needed here or in ``split``."""
        sample = self._sample_input if sample_input is None else sample_input
        if sample is None:
            raise ModelError("blocks() of a split model needs a batch of the data: blocks(sample_input)")
        return cut(self.whole, sample, at=self._at, num_blocks=self._num_blocks)


def split(
    model: nn.Module, at: Sequence[str] = (), num_blocks: int = 0, sample_input: Tensor | None = None
) -> SplitModel:
    """``model`` with a method ``blocks()``.

    ``at`` names submodules, as in ``model.named_modules()``: a block ends after each of them. Or ``num_blocks``
    blocks of about equal work. Without both, a block ends wherever one can.
    """
    if at and num_blocks:
        raise ModelError("split: give `at` or `num_blocks`, not both")
    if num_blocks < 0 or num_blocks == 1:
        raise ModelError(f"split: num_blocks = {num_blocks}; a window needs at least 2 blocks to slide over")
    return SplitModel(model, [at] if isinstance(at, str) else at, num_blocks, sample_input)


def cut(
    module: nn.Module, sample_input: Tensor, *, at: Sequence[str] = (), num_blocks: int = 0
) -> dict[str, nn.Module]:
    """The blocks by name, in order; an error says in words what is in the way."""
    place = f"a {type(module).__name__} cannot be cut into blocks"
    try:
        traced = trace(module)
    except CannotTrace as problem:
        raise ModelError(f"{place}: {problem}; {_REMEDY}") from problem
    plan = _Plan.of(traced, sample_input)
    if (given := plan.result) is not Tensor:
        raise ModelError(f"{place}: its forward gives a {given.__name__}; return the logits tensor alone")
    try:
        cuts = plan.cuts_at(at) if at else plan.all_cuts()
        if not (at or num_blocks):
            plan.check_shares(cuts)
    except _NoCut as problem:
        raise ModelError(
            f"{place}: {problem}; change that, or choose the cuts: fedel.models.split(model, at=[...]) or a"
            " method blocks()"
        ) from problem
    if num_blocks > len(cuts) + 1:
        raise ModelError(f"{place}: {num_blocks} are wanted, but there are places for {len(cuts) + 1}")
    if num_blocks:
        cuts = plan.balanced(cuts, num_blocks)
    ends = [*cuts, len(plan.steps) - 1]
    blocks: dict[str, nn.Module] = {}
    for number, (before, last) in enumerate(pairwise([-1, *ends]), start=1):
        name, block = plan.block(before + 1, last)
        blocks[f"{name}_{number}" if name in blocks else name] = block
    return blocks


_REMEDY = "give it a method blocks() that returns its parts in order: running one after the other is forward()"


class _NoCut(Exception):
    """Why there is no place for a cut, in words."""


@dataclass(frozen=True)
class _Plan:
    """The graph as a list of steps, each of which reads values of the input; sizes and weights are no steps."""

    traced: Traced
    steps: list[fx.Node]
    """From the input to the output of the network."""
    values: dict[fx.Node, tuple[Any, Any]]
    """What every node gave for a batch, and for one of twice the size."""
    work: dict[fx.Node, int]
    """Operations of every node."""
    last_use: dict[fx.Node, int]
    """The last step that reads what a step gave."""
    tied: dict[int, str]
    """Places where no cut can be, because a layer is used before and after, and the name of that layer.

    Place i is after step i."""

    @staticmethod
    def of(traced: Traced, sample_input: Tensor) -> _Plan:
        nodes = list(traced.graph.nodes)
        free = _free_of_values(nodes)
        steps = [n for n in nodes if n not in free and n.op != "output"]
        (out,) = (n for n in nodes if n.op == "output")
        number = {n: i for i, n in enumerate(steps)} | {out: len(steps)}
        last_use = {n: max((number[u] for u in n.users if u in number), default=-1) for n in steps}
        once, twice = _Recorder(traced), _Recorder(traced)
        with dry_run(traced.root):
            once.run(sample_input)
            twice.run(torch.cat([sample_input, sample_input]))
        values = {n: (once.values[n], twice.values[n]) for n in nodes if n.op != "output"}
        return _Plan(traced, steps, values, once.work, last_use, _tied(traced, steps, free))

    @property
    def result(self) -> type:
        """What the network returns."""
        (out,) = (n for n in self.traced.graph.nodes if n.op == "output")
        if not isinstance(out.args[0], fx.Node):
            return type(out.args[0])
        value = self.values[out.args[0]][0]
        return Tensor if isinstance(value, Tensor) else type(value)

    def live(self, place: int) -> list[fx.Node]:
        """The steps whose result is still read after this place."""
        return [n for n in self.steps[: place + 1] if self.last_use[n] > place]

    def obstacle(self, place: int) -> str:
        """Why there can be no cut after this step; empty if there can."""
        live = self.live(place)
        if len(live) > 1:
            skip = max(live, key=lambda n: self.last_use[n])
            before = reversed(self.steps[: place + 1])
            past = next((n for n in before if self._starts(n)), self.steps[place])
            return f"{_output(skip)} is read again by {self._reader(skip)}, past {_called(past)}"
        if place in self.tied:
            return f"the weights of '{self.tied[place]}' are used before and after"
        (node,) = live
        one, two = self.values[node]
        if not isinstance(one, Tensor):
            return f"{_called(node)} gives a {type(one).__name__}, not one tensor"
        if not one.is_floating_point() or not 2 <= one.ndim <= 5 or 2 * len(one) != len(two):
            return f"{_called(node)} gives no batch of floats, but {one.dtype} of shape {tuple(one.shape)}"
        if any(_changes(step, node, self.traced.root) for step in self.steps[place + 1 :]):
            return f"{_output(node)} is changed in place after that"
        return ""

    def all_cuts(self) -> list[int]:
        """Before every layer that starts a block, as late as possible."""
        starts = [i for i, n in enumerate(self.steps) if self._starts(n)]
        found = [self._latest(first, last) for first, last in pairwise(starts)]
        cuts = [place for place in found if place is not None]
        if not cuts:
            raise _NoCut(self._why_none(starts))
        return cuts

    def cuts_at(self, names: Sequence[str]) -> list[int]:
        known = {name: m for name, m in self.traced.root.named_modules() if name}
        cuts = []
        for name in names:
            if name not in known:
                raise _NoCut(f"it has no submodule '{name}' ({nearest(name, known)})")
            inside = [i for i, n in enumerate(self.steps) if name in _path(n)]
            if not inside:
                raise _NoCut(f"its forward does not use '{name}'")
            after = (i for i in range(inside[-1] + 1, len(self.steps)) if self._starts(self.steps[i]))
            following = next(after, None)
            if following is None:
                raise _NoCut(f"no layer with weights comes after '{name}', so no block can follow it")
            place = self._latest(inside[-1], following)
            if place is None:
                raise _NoCut(f"after '{name}' {self.obstacle(inside[-1])}")
            cuts.append(place)
        return sorted(set(cuts))

    def check_shares(self, cuts: list[int]) -> None:
        total = sum(self.work[n] for n in self.steps)
        for before, last in pairwise([-1, *cuts, len(self.steps) - 1]):
            inside = self.steps[before + 1 : last + 1]
            layers = [i for i, n in enumerate(self.steps) if self._starts(n) and before < i <= last]
            if len(layers) >= _MANY_LAYERS and sum(self.work[n] for n in inside) > _MOST_WORK * total:
                raise _NoCut(f"nearly all of it would be one block, because {self._why_none(layers)}")

    def balanced(self, cuts: list[int], num_blocks: int) -> list[int]:
        """The cuts that are nearest to equal shares of the work."""
        done = [sum(self.work[n] for n in self.steps[: place + 1]) for place in cuts]
        total = sum(self.work[n] for n in self.steps)
        chosen: list[int] = []
        for share in range(1, num_blocks):
            first, last = (chosen[-1] + 1 if chosen else 0), len(cuts) - (num_blocks - 1 - share)
            wanted = total * share / num_blocks
            chosen.append(min(range(first, last), key=lambda i: abs(done[i] - wanted)))
        return [cuts[i] for i in chosen]

    def block(self, first: int, last: int) -> tuple[str, nn.Module]:
        """Steps ``first`` to ``last`` as a module, named after what is in it."""
        graph = fx.Graph()
        entering = self.live(first - 1)[0] if first else self.steps[0]
        copied = {entering: graph.placeholder("x")}
        for step in self.steps[max(first, 1) : last + 1]:
            self._copy(step, graph, copied)
        (leaving,) = self.live(last)
        graph.output(copied[leaving])
        module = fx.GraphModule(self.traced.root, graph)
        _own_modes(module)
        names = [str(n.target) for n in self.steps[first : last + 1] if self._starts(n)]
        return _common_path(names).replace(".", "_"), module

    def _copy(self, node: fx.Node, graph: fx.Graph, copied: dict[fx.Node, fx.Node]) -> Any:
        """``node`` in the graph of a block; a size that an earlier block knows becomes a number."""
        if node in copied:
            return copied[node]
        if _asks_for_size(node) and node.all_input_nodes[0] not in copied:
            entering = next(iter(copied.values()))
            return self._number(graph, entering, _attribute(node), *self.values[node])
        for needed in node.all_input_nodes:
            if needed not in copied and not _asks_for_size(needed):
                self._copy(needed, graph, copied)
        args, kwargs = (
            fx.node.map_arg(part, lambda n: self._copy(n, graph, copied)) for part in (node.args, node.kwargs)
        )
        copied[node] = graph.create_node(node.op, node.target, args, kwargs)
        return copied[node]

    def _number(self, graph: fx.Graph, entering: fx.Node, asked: str, one: Any, two: Any) -> Any:
        batch = self.values[self.steps[0]]
        if isinstance(one, tuple):
            return tuple(self._number(graph, entering, asked, a, b) for a, b in zip(one, two, strict=True))
        if isinstance(one, int) and (one, two) == (len(batch[0]), len(batch[1])):
            return graph.call_method("size", (entering, 0))
        if asked == "device":
            return graph.call_function(getattr, (entering, "device"))
        return one

    def _latest(self, first: int, following: int) -> int | None:
        return next((i for i in range(following - 1, first - 1, -1) if not self.obstacle(i)), None)

    def _starts(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        layer = self.traced.root.get_submodule(str(node.target))
        return next(layer.parameters(), None) is not None and not isinstance(layer, JOINS)

    def _reader(self, node: fx.Node) -> str:
        last = self.last_use[node]
        return _called(self.steps[last]) if last < len(self.steps) else "the end of forward"

    def _why_none(self, starts: list[int]) -> str:
        if self.traced.unseen:
            name, why = next(iter(self.traced.unseen.items()))
            return f"'{name}' cannot be followed ({why}), and around it there is no place for a cut"
        if len(starts) < 2:
            return f"it has {len(starts)} layer(s) with weights, and a window needs at least 2 blocks"
        places = [i for i in range(starts[0], starts[-1]) if self.obstacle(i)]
        return self.obstacle(max(places, key=lambda i: (self._longest(i), i)))

    def _longest(self, place: int) -> int:
        """How many steps the tensor that is kept longest is kept, of those that are live at this place."""
        return max(self.last_use[n] - self.steps.index(n) for n in self.live(place))


class _Recorder(fx.Interpreter):
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


def _free_of_values(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on weights and on sizes of the input, not on its values."""
    free: set[fx.Node] = set()
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _asks_for_size(node) or free.issuperset(node.all_input_nodes):
            free.add(node)
    return free


def _asks_for_size(node: fx.Node) -> bool:
    return _attribute(node) in _SIZES


def _attribute(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    return str(node.args[1]) if node.target is getattr else ""


def _tied(traced: Traced, steps: Sequence[fx.Node], free: set[fx.Node]) -> dict[int, str]:
    used: dict[int, tuple[int, int, str]] = {}
    for i, step in enumerate(steps):
        for node in _with_free(step, free):
            for name, tensor in _tensors(traced.root, node):
                first = used.get(id(tensor), (i, i, name))[0]
                used[id(tensor)] = (first, i, used.get(id(tensor), (i, i, name))[2])
    return {place: name for first, last, name in used.values() for place in range(first, last)}


def _with_free(step: fx.Node, free: set[fx.Node]) -> Iterator[fx.Node]:
    """A step, and the nodes that go with it into its block."""
    yield step
    for node in step.all_input_nodes:
        if node in free and not _asks_for_size(node):
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


def _changes(step: fx.Node, node: fx.Node, root: nn.Module) -> bool:
    """Whether ``step`` overwrites what ``node`` gave."""
    if not step.args or step.args[0] is not node:
        return False
    if step.op == "call_module":
        return bool(getattr(root.get_submodule(str(step.target)), "inplace", False))
    if step.kwargs.get("inplace") is True:
        return True
    name = step.target if isinstance(step.target, str) else getattr(step.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def _own_modes(block: fx.GraphModule) -> None:
    """Layers without tensors are often used again, such as a dropout; each block is in a mode of its own."""
    for node in block.graph.find_nodes(op="call_module"):
        layer = block.get_submodule(str(node.target))
        if not [*layer.parameters(), *layer.buffers()]:
            parent, _, name = str(node.target).rpartition(".")
            setattr(block.get_submodule(parent), name, copy.deepcopy(layer))


def _common_path(names: Sequence[str]) -> str:
    """The module in which all of these are; if that is the whole network, its part with the first of them.

    >>> _common_path(["layer1.0.conv1", "layer1.0.conv2"]), _common_path(["layer1.0.conv1", "layer2.0.conv1"])
    ('layer1.0', 'layer1')
    """
    parts = [name.split(".") for name in names]
    common = takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in common) or parts[0][0]


def _path(node: fx.Node) -> set[str]:
    """The submodules inside which a node runs."""
    return {str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()}


def _output(node: fx.Node) -> str:
    return "the input" if node.op == "placeholder" else f"the output of {_called(node)}"


def _called(node: fx.Node) -> str:
    """A node in the words of the user's code."""
    if node.op == "call_module":
        return f"'{node.target}'"
    if node.op == "placeholder":
        return "the input"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    inside = max(_path(node), key=len, default="")
    return f"{name}() in '{inside}'" if inside else f"{name}() in forward"
