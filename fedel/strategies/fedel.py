"""FedEL (Zhang et al., 2025): the same time budget for everyone, spent inside a sliding window of blocks.

Line numbers are those of the paper's Algorithm 1. Lines 8 to 10 come after line 11 here: importance needs an
exit at the window's front, and is only needed inside the window (A11).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.core import memory_budget
from fedel.core.budgeted import SELECTIONS, Choice, Prices, choose, choose_in_memory, choose_whole
from fedel.core.importance import blend, local
from fedel.core.prefix import bytes_per_sample, frozen_steps, room_for
from fedel.core.timing import SCOPES
from fedel.core.window import VARIANTS, shrink, slide, whole_window
from fedel.seeds import generator
from fedel.strategies.base import (
    STEPS,
    WEIGHTINGS,
    MeanFold,
    Method,
    check_damping,
    check_scope,
    draw,
    one_of,
    steps_fit,
    task_for,
    train_spec_for,
    update_of,
)
from fedel.strategies.inner_exits import InnerExits, Teaching, answering, check_answer
from fedel.types import (
    FREE,
    Fold,
    Memory,
    ModelSpec,
    Plan,
    RoundContext,
    StepCost,
    Task,
    Tensors,
    Trainer,
    Update,
    Window,
)

STARTS = ("first", "spread")
MAX_PROBE = 0.2
"""Share of T_th beyond which the probe is not worth its time, with steps that fit T_th: then all tensors count
the same here, and the global importance decides."""


@dataclass(frozen=True)
class FedEL(Method):
    name: ClassVar[str] = "fedel"
    fits_memory: ClassVar[bool] = True

    beta: float = 0.6
    """Share of local importance in the blend; the rest is the global model's last change."""
    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation; ``train``, the whole step; or
    ``round``, all that a client does in a round: download, probe, steps, upload."""
    steps: str = ""
    """``plan``: the planned number in every round; ``fit``: as many as T_th pays for. Empty: ``fit``, except in
    scope ``backward``."""
    variant: str = "fedel"
    """Window: ``fedel``; ``disjoint`` is the paper's FedEL-C; ``no-rollback`` never starts again."""
    hold_rounds: int = 10
    """Rounds each window is held in the variant ``no-rollback``."""
    start: str = "first"
    """Where a client's windows begin: at the ``first`` block, as in the paper, or ``spread`` over the network
    by chance, so that devices of one type do not slide in step."""
    window_within: bool = False
    """Windows that fit the budget as a whole, instead of just above it: each begins behind the one before, and
    is trained whole without a probe. The paper's rule leaves out what has the longest way back, so slow
    devices hardly train the first blocks."""
    answer: float = 0.0
    """Share of the exits, from the deepest on, that answer together: the model's answer is the mean of their
    logits. Those inside a window learn too, from what their blocks give and without changing these; steps pay
    for it. 0: the last exit alone, as in the paper."""
    teach: float = 0.0
    """Train all exits inside the window, each also by the mean of the others' logits, with this weight; 0: the
    exit at its front alone, as in the paper."""
    dp: str = "exact"
    """Tensor selection: ``exact``, or ``official`` for ElasticTrainer's own dynamic programme."""
    weighting: str = "uniform"
    """How much a client counts in the masked mean: ``uniform`` or ``samples``."""
    damping: float = 0.0
    """How much less a value moves the fewer clients trained it: ``share ** damping`` of the way to their mean,
    where share is their part of the round's clients, by weight. 0: all the way, as in the paper."""
    train_all_that_fits: bool = False
    """Where the whole window fits the budget, train it whole; importance is not needed, nor its probe. With
    steps that fit T_th it is always so."""
    probe_in_budget: bool = False
    """Take the importance probe's time out of T_th, as scope ``round`` always does; otherwise it comes on top,
    as in the paper."""
    prefix_cache_mb: int = 0
    """Megabytes in which to keep the outputs of the frozen blocks, for samples that come again in a round."""

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta = {self.beta:g}: the share of local importance lies between 0 and 1")
        if self.hold_rounds < 1:
            raise ValueError(f"hold_rounds = {self.hold_rounds}: a window is held for at least 1 round")
        check_answer(self.answer)
        if self.teach < 0:
            raise ValueError(f"teach = {self.teach:g}: a weight is at least 0, which switches it off")
        if self.prefix_cache_mb < 0:
            raise ValueError(f"prefix_cache_mb = {self.prefix_cache_mb}: 0 is the least, and keeps nothing")
        check_scope(self.budget_scope, SCOPES)
        one_of("steps", self.steps, STEPS)
        one_of("variant", self.variant, VARIANTS)
        one_of("start", self.start, STARTS)
        if self.window_within and self.variant != "fedel":
            raise ValueError(f"window_within goes with variant = 'fedel', not with {self.variant!r}")
        one_of("dp", self.dp, SELECTIONS)
        one_of("weighting", self.weighting, WEIGHTINGS)
        check_damping(self.damping)

    @property
    def fits_steps(self) -> bool:
        return steps_fit(self.steps, self.budget_scope)

    def exits_to_average(self, spec: ModelSpec) -> tuple[int, ...]:
        return answering(spec, self.answer)

    def plan(self, context: RoundContext) -> Plan:
        return Plan(tuple(task_for(context, client) for client in draw(context)))

    def tensors_needed(self, task: Task, memory: Memory, trainer: Trainer) -> Collection[str] | None:
        """Blocks up to the window's front, and the exits through which the window trains."""
        trainer = self._with_inner_exits(trainer)
        window = self.slide(task, memory, trainer).window
        assert window is not None
        return trainer.spec.tensors_for(trainer.spec.exits_for(window.end, window.front))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        trainer = self._with_inner_exits(trainer)
        memory = self.slide(task, memory, trainer)  # line 11
        prices, window = Prices.of(task, trainer, self.budget_scope), memory.window
        assert window is not None
        prices = replace(prices, frozen_share=self._frozen_share(task, trainer, window))
        if memory_budget.fits(trainer.spec, trainer.profile, window, task.memory_bytes):
            choice, probe = self._choose(task, model, window, trainer, prices)
        else:
            window = Window(window.front, window.front)
            choice, probe = choose_in_memory(task, window, trainer, prices, self.fits_steps), FREE
            memory = replace(memory, window=window)
        train_spec = train_spec_for(
            task,
            trainer,
            choice.selected,
            window,
            num_steps=choice.num_steps,
            last_share=choice.last_share,
        )
        room = self._cache_bytes(task, trainer, choice.selected, window)
        detached = bool(self.answer) and not self.teach
        train_spec = replace(train_spec, prefix_cache_bytes=room, detached=detached)
        trained = trainer.train(model, train_spec)  # line 13
        update = update_of(
            task,
            model,
            trainer,
            train_spec,
            trained,
            prices.step(choice.selected, window),
            window,
            probe=probe,
            resets=memory.resets,
            rounds_held=memory.rounds_held,
            over_budget=not choice.in_budget,
        )
        return update, replace(memory, selected=update.report.selected)

    def _with_inner_exits(self, trainer: Trainer) -> Trainer:
        if self.teach:
            return InnerExits(trainer, range(1, trainer.spec.num_blocks + 1), Teaching(self.teach))
        exits = self.exits_to_average(trainer.spec)
        return InnerExits(trainer, exits) if exits else trainer

    def _choose(
        self, task: Task, model: Tensors, window: Window, trainer: Trainer, prices: Prices
    ) -> tuple[Choice, StepCost]:
        """What to train in the window, and what the probe for that cost."""
        if self.train_all_that_fits or self.fits_steps or self.window_within:
            whole_window = choose_whole(prices, window, self.fits_steps)
            if whole_window is not None:
                return whole_window, FREE
        probe = prices.probe(window)
        seconds = probe.total(self.budget_scope)
        if self.fits_steps and seconds > MAX_PROBE * prices.round_seconds:
            probe, seconds = FREE, 0.0
            change = dict.fromkeys((t.name for t in trainer.spec.weights_in(window.end, window.front)), 0.0)
        else:
            change = dict(trainer.probe(model, window, task.work, task.seed))  # line 8
        importance = blend(local(change), task.global_importance, self.beta)  # lines 9 and 10
        in_budget = self.probe_in_budget or prices.whole_round
        choice = choose(  # line 12
            prices, window, importance, self.dp, seconds if in_budget else 0.0, self.fits_steps
        )
        return choice, probe

    def _cache_bytes(self, task: Task, trainer: Trainer, selected: Collection[str], window: Window) -> int:
        """Room for the outputs of the frozen blocks while ``selected`` trains."""
        if not self.prefix_cache_mb or window.end == 1 or not trainer.same_inputs:
            return 0
        wanted = self.prefix_cache_mb * 10**6
        return room_for(trainer.spec, trainer.profile, selected, window, wanted, task.memory_bytes)

    def _frozen_share(self, task: Task, trainer: Trainer, window: Window) -> float:
        """The share of the planned steps that run the frozen blocks, if the whole window trains."""
        every = {t.name for t in trainer.spec.weights_in(window.end, window.front)}
        room = self._cache_bytes(task, trainer, every, window)
        if not room:
            return 1.0
        steps, sample_bytes = (
            task.work.steps_for(trainer.num_samples),
            bytes_per_sample(trainer.profile, window),
        )
        return frozen_steps(task.work, trainer.num_samples, steps, sample_bytes, room) / steps

    def slide(self, task: Task, memory: Memory, trainer: Trainer) -> Memory:
        """The memory with this round's window; it is kept only if the update that follows is accepted."""

        def in_memory(window: Window) -> bool:
            return memory_budget.fits(trainer.spec, trainer.profile, window, task.memory_bytes)

        held = memory.rounds_held + 1
        if self.variant == "no-rollback" and memory.window is not None and held < self.hold_rounds:
            window = shrink(memory.window, memory.window.end, memory.window.front, in_memory)
            return replace(memory, window=window, rounds_held=held)
        blocks = {trainer.spec.by_name[name].block for name in memory.selected}
        prices = Prices.of(task, trainer, self.budget_scope)
        window = self.next_window(memory.window, blocks, prices, task.seed, in_memory)
        was_last = memory.window is not None and memory.window.front == trainer.spec.num_blocks
        reset = was_last and self.variant != "no-rollback"
        return replace(memory, window=window, resets=memory.resets + reset, rounds_held=0)

    def next_window(
        self,
        window: Window | None,
        blocks: Collection[int],
        prices: Prices,
        seed: int,
        in_memory: Callable[[Window], bool] = lambda _: True,
    ) -> Window:
        """The window after ``window``, of which ``blocks`` were trained."""
        # Tensors can be left out of the backward pass, blocks cannot be left out of the forward pass: where
        # that counts, a window just above the budget would spend it all on the way in.
        within, seconds, last = self.budget_scope != "backward", prices.block_seconds(), prices.spec.num_blocks
        budget = prices.budget_seconds - (prices.profile.overhead_seconds if within else 0.0)

        def after(window: Window | None, blocks: Collection[int] = ()) -> Window:
            if self.window_within:
                new = whole_window(window, last, lambda w: choose_whole(prices, w) is not None)
                return shrink(new, new.end, last, in_memory)
            return slide(window, blocks, seconds, budget, self.variant, within, in_memory)

        if window is not None or self.start == "first":
            return after(window, blocks)
        cycle = [after(None)]
        while cycle[-1].front < last:
            cycle.append(after(cycle[-1]))
        return cycle[generator(seed, "start").integers(len(cycle))]

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting, self.damping)  # line 15
