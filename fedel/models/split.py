"""Cuts a network into blocks where exactly one tensor goes on; layers and their names stay the user's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from fedel.errors import ModelError
from fedel.models.cuts import CutPlan, NoCut
from fedel.models.trace import CannotTrace, trace

_REMEDY = "give it a method blocks() that returns its parts in order: running one after the other is forward()"


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
    plan = CutPlan.of(traced, sample_input)
    if (given := plan.result) is not Tensor:
        raise ModelError(f"{place}: its forward gives a {given.__name__}; return the logits tensor alone")
    try:
        cuts = plan.cuts_at(at) if at else plan.all_cuts()
        if not (at or num_blocks):
            plan.check_shares(cuts)
    except NoCut as problem:
        raise ModelError(
            f"{place}: {problem}; change that, or choose the cuts: fedel.models.split(model, at=[...]) or a"
            " method blocks()"
        ) from problem
    if num_blocks > len(cuts) + 1:
        raise ModelError(f"{place}: {num_blocks} are wanted, but there are places for {len(cuts) + 1}")
    if num_blocks:
        cuts = plan.balanced(cuts, num_blocks)
    blocks: dict[str, nn.Module] = {}
    for number, (before, last) in enumerate(pairwise([-1, *cuts, len(plan.steps) - 1]), start=1):
        name, block = plan.block(before + 1, last)
        blocks[f"{name}_{number}" if name in blocks else name] = block
    return blocks
