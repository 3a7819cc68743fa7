"""Where a network can be cut: where one tensor goes on in its graph; and what is in the way elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from fedel.config import nearest
from fedel.models.nodes import (
    Recorder,
    asked_for,
    asks_for_size,
    called,
    common_path,
    free_of_values,
    inside_of,
    output_of,
    overwrites,
    own_modes,
    tied_places,
)
from fedel.models.trace import Traced, dry_run

JOINS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.PReLU)
"""Layers that have weights and yet join the block before: a conv and its norm are cut nowhere between."""
_MOST_WORK, _MANY_LAYERS = 0.8, 4
"""A block of this many layers that has more than this share of the work leaves nothing to slide over."""


class NoCut(Exception):
    """Why there is no place for a cut, in words."""


@dataclass(frozen=True)
class CutPlan:
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
    def of(traced: Traced, sample_input: Tensor) -> CutPlan:
        nodes = list(traced.graph.nodes)
        free = free_of_values(nodes)
        steps = [n for n in nodes if n not in free and n.op != "output"]
        (out,) = (n for n in nodes if n.op == "output")
        number = {n: i for i, n in enumerate(steps)} | {out: len(steps)}
        last_use = {n: max((number[u] for u in n.users if u in number), default=-1) for n in steps}
        once, twice = Recorder(traced), Recorder(traced)
        with dry_run(traced.root):
            once.run(sample_input)
            twice.run(torch.cat([sample_input, sample_input]))
        values = {n: (once.values[n], twice.values[n]) for n in nodes if n.op != "output"}
        return CutPlan(traced, steps, values, once.work, last_use, tied_places(traced, steps, free))

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
            return f"{output_of(skip)} is read again by {self._reader(skip)}, past {called(past)}"
        if place in self.tied:
            return f"the weights of '{self.tied[place]}' are used before and after"
        (node,) = live
        one, two = self.values[node]
        if not isinstance(one, Tensor):
            return f"{called(node)} gives a {type(one).__name__}, not one tensor"
        if not one.is_floating_point() or not 2 <= one.ndim <= 5 or 2 * len(one) != len(two):
            return f"{called(node)} gives no batch of floats, but {one.dtype} of shape {tuple(one.shape)}"
        if any(overwrites(step, node, self.traced.root) for step in self.steps[place + 1 :]):
            return f"{output_of(node)} is changed in place after that"
        return ""

    def all_cuts(self) -> list[int]:
        """Before every layer that starts a block, as late as possible."""
        starts = [i for i, n in enumerate(self.steps) if self._starts(n)]
        found = [self._latest(first, last) for first, last in pairwise(starts)]
        cuts = [place for place in found if place is not None]
        if not cuts:
            raise NoCut(self._why_none(starts))
        return cuts

    def cuts_at(self, names: Sequence[str]) -> list[int]:
        known = {name: m for name, m in self.traced.root.named_modules() if name}
        cuts = []
        for name in names:
            if name not in known:
                raise NoCut(f"it has no submodule '{name}' ({nearest(name, known)})")
            inside = [i for i, n in enumerate(self.steps) if name in inside_of(n)]
            if not inside:
                raise NoCut(f"its forward does not use '{name}'")
            after = (i for i in range(inside[-1] + 1, len(self.steps)) if self._starts(self.steps[i]))
            following = next(after, None)
            if following is None:
                raise NoCut(f"no layer with weights comes after '{name}', so no block can follow it")
            place = self._latest(inside[-1], following)
            if place is None:
                raise NoCut(f"after '{name}' {self.obstacle(inside[-1])}")
            cuts.append(place)
        return sorted(set(cuts))

    def check_shares(self, cuts: list[int]) -> None:
        total = sum(self.work[n] for n in self.steps)
        for before, last in pairwise([-1, *cuts, len(self.steps) - 1]):
            inside = self.steps[before + 1 : last + 1]
            layers = [i for i, n in enumerate(self.steps) if self._starts(n) and before < i <= last]
            if len(layers) >= _MANY_LAYERS and sum(self.work[n] for n in inside) > _MOST_WORK * total:
                raise NoCut(f"nearly all of it would be one block, because {self._why_none(layers)}")

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
        own_modes(module)
        names = [str(n.target) for n in self.steps[first : last + 1] if self._starts(n)]
        return common_path(names).replace(".", "_"), module

    def _copy(self, node: fx.Node, graph: fx.Graph, copied: dict[fx.Node, fx.Node]) -> Any:
        """``node`` in the graph of a block; a size that an earlier block knows becomes a number."""
        if node in copied:
            return copied[node]
        if asks_for_size(node) and node.all_input_nodes[0] not in copied:
            entering = next(iter(copied.values()))
            return self._number(graph, entering, asked_for(node), *self.values[node])
        for needed in node.all_input_nodes:
            if needed not in copied and not asks_for_size(needed):
                self._copy(needed, graph, copied)

        def copy(needed: fx.Node) -> Any:
            return self._copy(needed, graph, copied)

        args, kwargs = fx.node.map_arg(node.args, copy), fx.node.map_arg(node.kwargs, copy)
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
        return called(self.steps[last]) if last < len(self.steps) else "the end of forward"

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
