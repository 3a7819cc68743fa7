"""What to train inside a window within T_th, and what it costs (paper, section 4.1; algorithms A3, A21).

FedEL and ElasticTrainer choose tensors here; they and TimelyFL price their windows here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fedel.core.compression import sent_bytes
from fedel.core.memory_budget import part_of_front
from fedel.core.selection import select
from fedel.core.selection_official import select_official
from fedel.core.steps import least_part, least_samples, part_of_batch
from fedel.core.timing import SLACK, block_seconds, fits, independent_updates, step_cost
from fedel.types import (
    AS_PROFILED,
    PLAIN,
    ModelSpec,
    Role,
    Speed,
    StepCost,
    Task,
    TimingProfile,
    Trainer,
    UploadSettings,
    Window,
)

SELECTIONS = ("exact", "official")
"""``official`` is the dynamic programme of ElasticTrainer's reference code, with its rounding."""
MAX_FILL = 4
"""A client whose window is cheap makes at most this many times the planned steps to fill T_th."""
IDLE_PERCENT = 2
"""What may be left of T_th if more is trained that way."""
NEIGHBOURS = 3
"""Numbers of steps on each side of the first guess that are tried to fill T_th better."""


def window_cost(
    spec: ModelSpec,
    profile: TimingProfile,
    selected: Collection[str],
    window: Window,
    frozen_share: float = 1.0,
) -> StepCost:
    """Seconds of one step that trains ``selected`` inside ``window``."""
    exits = spec.exits_for(window.end, window.front)
    return step_cost(profile, selected, exits, window.end, spec.exit_each, frozen_share)


@dataclass(frozen=True)
class Prices:
    """What each part of one client's round costs, and the T_th it is paid from.

    In scope ``round``, what is paid once in a round counts too: the probe, what comes down for a window, and
    what goes up for each tensor that is trained.
    """

    spec: ModelSpec
    profile: TimingProfile
    """As measured rounds corrected it."""
    scope: str
    budget_seconds: float
    """T_th of one step."""
    num_steps: int
    """Steps of the plan; T_th of the round is ``budget_seconds`` times as long."""
    batch_size: int
    """Samples in a step."""
    speed: Speed = AS_PROFILED
    frozen_share: float = 1.0
    """Share of the steps in which the frozen blocks run; less where their outputs are kept."""
    upload: UploadSettings = PLAIN
    """How what is trained travels."""

    @staticmethod
    def of(task: Task, trainer: Trainer, scope: str) -> Prices:
        """The trainer's profile is that of its device, corrected by ``task.speed``."""
        return Prices.on(task, trainer.spec, trainer.profile, trainer.num_samples, scope)

    @staticmethod
    def on(task: Task, spec: ModelSpec, profile: TimingProfile, num_samples: int, scope: str) -> Prices:
        steps = task.work.steps_for(num_samples)
        size = min(task.work.batch_size, num_samples)
        return Prices(spec, profile, scope, task.budget_seconds, steps, size, task.speed, upload=task.upload)

    @property
    def round_seconds(self) -> float:
        return self.budget_seconds * self.num_steps

    @property
    def whole_round(self) -> bool:
        return self.scope == "round"

    @property
    def of_the_front(self) -> Prices:
        """The same where a window trains through the exit at its front alone."""
        if not self.spec.inner_exits:
            return self
        return replace(self, spec=replace(self.spec, inner_exits=frozenset()))

    def step(self, selected: Collection[str], window: Window) -> StepCost:
        return window_cost(self.spec, self.profile, selected, window, self.frozen_share)

    def step_seconds(self, selected: Collection[str], window: Window) -> float:
        return self.step(selected, window).total(self.scope)

    def probe(self, window: Window) -> StepCost:
        """The importance probe: two passes, forward and backward, over every tensor of the window."""
        once = self.step({t.name for t in self.spec.weights_in(window.end, window.front)}, window)
        return once.scaled(2 * self.speed.probe_slowness / self.speed.slowness)

    def part_of_batch(self, left: float) -> float:
        """The share of a batch for which ``left`` of a step's time pays; 0 where it is not worth a step."""
        return part_of_batch(left, self.batch_size, least_samples(self.spec))

    def steps_in(self, seconds: float, step_seconds: float) -> tuple[int, float]:
        """How many steps these seconds pay for, and the share of a batch in the last of them.

        At most ``MAX_FILL`` times the plan; where they pay for none, the shortest one that is worth it.
        """
        most = MAX_FILL * self.num_steps
        steps = seconds / step_seconds * (1 + SLACK) if step_seconds > 0 else float(self.num_steps)
        if steps >= most:
            return most, 1.0
        whole = math.floor(max(0.0, steps))
        share = self.part_of_batch(steps - whole)
        if whole and not share:
            return whole, 1.0
        return whole + 1, share or least_part(self.batch_size, least_samples(self.spec))

    def once_seconds(self, selected: Collection[str], window: Window) -> float:
        """What is paid once in a round besides the probe, where that counts: the transfers, and storing."""
        if not self.whole_round:
            return 0.0
        down = self.speed.transfer_seconds(self.bytes_down(window), 0)
        return down + self.upload_seconds(selected, window) + self.speed.other_seconds

    def upload_seconds(self, selected: Collection[str], window: Window) -> float:
        if not self.whole_round:
            return 0.0
        return self.speed.transfer_seconds(0, self.bytes_up(selected, window))

    def sent_seconds(self, name: str) -> float:
        """What training a tensor adds to the upload, for each of the planned steps."""
        return self.speed.transfer_seconds(0, self._sent[name]) / self.num_steps if self.whole_round else 0.0

    def block_seconds(self) -> list[float]:
        """Of each block for each of the planned steps, its transfers included where they count."""
        seconds = block_seconds(self.profile, self.scope)
        if self.whole_round:
            for t in self.spec.tensors:
                both_ways = self.speed.transfer_seconds(t.num_bytes, self._sent[t.name])
                seconds[t.block - 1] += both_ways / self.num_steps
        return seconds

    def bytes_down(self, window: Window) -> int:
        """What a client has to hold for a window: everything up to its front, and the exits it uses."""
        needed = self.spec.tensors_for(self.spec.exits_for(window.end, window.front))
        return sum(self.spec.by_name[name].num_bytes for name in needed)

    def bytes_up(self, selected: Collection[str], window: Window) -> int:
        """What it sends: the selected tensors, the exits it used, and the statistics of the window."""
        exits = self.spec.exits_for(window.end, window.front)
        return sum(
            self._sent[t.name]
            for t in self.spec.tensors
            if t.name in selected
            or (t.role is Role.EXIT and t.block in exits)
            or (t.role is Role.BUFFER and window.end <= t.block <= window.front)
        )

    @cached_property
    def _sent(self) -> Mapping[str, int]:
        """Bytes of each tensor in an update."""
        return {t.name: sent_bytes(self.upload, t) for t in self.spec.tensors}


@dataclass(frozen=True)
class Choice:
    """What a client trains in a round."""

    selected: frozenset[str]
    num_steps: int
    in_budget: bool
    """Even the smallest useful piece of work may be over budget: then this is it."""
    last_share: float = 1.0
    """Share of a batch in the last step."""

    @property
    def batches(self) -> float:
        """What the steps come to in whole ones."""
        return self.num_steps - 1 + self.last_share


def choose(
    prices: Prices,
    window: Window,
    importance: Mapping[str, float],
    dp: str = "exact",
    probe_seconds: float = 0.0,
    fit_steps: bool = False,
) -> Choice:
    """The window's best tensors within T_th. ``probe_seconds`` is what of T_th went into the probe.

    With ``fit_steps``, the number of steps fits T_th too. A step has time for the whole front block, and half
    of it goes into training: where T_th is too short for that, fewer and fuller steps are made. Where the
    window costs less than T_th, more steps are made. What is left after the whole steps pays for one more on a
    part of a batch.
    """
    once, steps = probe_seconds + prices.once_seconds((), window), prices.num_steps
    if not fit_steps:
        budget = prices.budget_seconds
        # Half of T_th is kept for training: with few steps the probe would take all of it.
        return _chosen(prices, window, importance, dp, budget - min(once / steps, budget / 2), steps)
    room = prices.round_seconds - min(once, prices.round_seconds / 2)
    at_front = {t.name for t in prices.spec.weights_in(window.front, window.front)}
    least_step = max(2 * prices.step_seconds((), window), prices.step_seconds(at_front, window))
    if least_step > 0:
        steps = max(1, min(steps, int(room / least_step * (1 + SLACK))))
    tries = range(max(1, steps - NEIGHBOURS), min(prices.num_steps, steps + NEIGHBOURS) + 1)
    found = (_filled(prices, window, _chosen(prices, window, importance, dp, room / n, n), once) for n in tries)

    def merit(choice: Choice) -> tuple[bool, float, float]:
        worth_it = 4 * prices.step_seconds(choice.selected, window) > 3 * least_step
        value = choice.batches * sum(importance[name] for name in choice.selected)
        return worth_it, -max(IDLE_PERCENT, _idle_percent(prices, window, choice, once)), value

    return max(found, key=merit)


def least_seconds(prices: Prices) -> float:
    """The shortest round in which something comes of every window: one step of the cheapest tensor of the last
    block, and the transfers where they count. A probe that would be long is left out anyway."""
    last = prices.spec.num_blocks
    window = Window(last, last)
    return min(
        prices.step_seconds({t.name}, window) + prices.once_seconds({t.name}, window)
        for t in prices.spec.weights_in(last, last)
    )


def choose_whole(prices: Prices, window: Window, fit_steps: bool = False) -> Choice | None:
    """The whole window, if that fits T_th; importance then has nothing to decide.

    What exits inside the window cost is paid with steps: otherwise the fastest device, for which T_th is the
    plain model's time, could no longer train the whole network.
    """
    every = frozenset(t.name for t in prices.spec.weights_in(window.end, window.front))
    plain = prices.of_the_front
    once = plain.once_seconds(every, window) / prices.num_steps
    if not fits(plain.step_seconds(every, window) + once, prices.budget_seconds):
        return None
    return fill(prices, window, every, fit_steps)


def choose_in_memory(
    task: Task, window: Window, trainer: Trainer, prices: Prices, fit_steps: bool = False
) -> Choice:
    """What fits the device's memory of the front block, where not even its probe does."""
    spec, profile = trainer.spec, trainer.profile
    selected = part_of_front(spec, profile, window.front, task.global_importance, task.memory_bytes)
    return replace(fill(prices, window, selected, fit_steps), in_budget=False)


def fill(prices: Prices, window: Window, selected: Collection[str], fit_steps: bool = False) -> Choice:
    """These tensors, with as many steps as T_th pays for, or those of the plan; fewer, where exits inside the
    window are paid from them."""
    planned = Choice(frozenset(selected), prices.num_steps, True)
    if not fit_steps and not prices.spec.inner_exits:
        return planned
    filled = _filled(prices, window, planned, prices.once_seconds((), window))
    return filled if fit_steps or filled.batches < planned.batches else planned


def _filled(prices: Prices, window: Window, choice: Choice, once: float) -> Choice:
    """The choice with as many steps as T_th pays for, and at least one."""
    sent = prices.once_seconds(choice.selected, window) - prices.once_seconds((), window)
    room = prices.round_seconds - once - sent
    step = prices.step_seconds(choice.selected, window)
    steps, last_share = prices.steps_in(room, step)
    filled = Choice(choice.selected, steps, True, last_share)
    return replace(filled, in_budget=fits(filled.batches * step, room))


def _idle_percent(prices: Prices, window: Window, choice: Choice, once: float) -> int:
    """Share of T_th that is not used, in whole percent; what is over it counts the same."""
    sent = prices.once_seconds(choice.selected, window) - prices.once_seconds((), window)
    spent = once + sent + choice.batches * prices.step_seconds(choice.selected, window)
    return math.floor(100 * abs(1 - spent / prices.round_seconds))


def _chosen(
    prices: Prices,
    window: Window,
    importance: Mapping[str, float],
    dp: str,
    budget_seconds: float,
    num_steps: int,
) -> Choice:
    """The best tensors for ``num_steps`` of at most ``budget_seconds`` each.

    Something is always trained: if importance favours nothing, the cheapest tensor of the front block that
    fits. If nothing fits, the step is over budget. Where the forward pass by itself fills the budget, the
    front block is trained all the same: that adds little to what is spent already, and nothing else would come
    of it. Otherwise only the front's exit is trained.
    """
    spec = prices.spec

    def seconds(selected: Collection[str]) -> float:
        sent = sum(prices.sent_seconds(name) for name in selected) * prices.num_steps / num_steps
        return prices.step_seconds(selected, window) + sent

    times = [prices.profile.by_name[t.name] for t in spec.weights_in(window.end, window.front)]
    room = budget_seconds * (1 + SLACK) - seconds(())
    grads = [t.grad_seconds for t in times]
    updates = [t.update_seconds for t in times]
    if spec.exit_each:
        grads, updates = [0.0] * len(times), independent_updates(times)
    if prices.whole_round:
        sent = prices.num_steps / num_steps
        updates = [u + prices.sent_seconds(t.name) * sent for u, t in zip(updates, times, strict=True)]
    method = select if dp == "exact" else select_official
    chosen = method(grads, updates, [importance[t.name] for t in times], room) if room > 0 else []
    selected = {t.name for t, taken in zip(times, chosen, strict=False) if taken}
    if selected:
        return Choice(frozenset(selected), num_steps, fits(seconds(selected), budget_seconds))
    at_front = [t.name for t in times if t.block == window.front]
    cheapest = min(at_front, key=lambda name: seconds({name}))
    if fits(seconds({cheapest}), budget_seconds):
        return Choice(frozenset({cheapest}), num_steps, True)
    # At the last block the classifier is the exit: there is no other head to train in its place.
    own_head = window.front == spec.num_blocks or spec.exit_each
    forward_fills_it = prices.scope != "backward" and room <= 0
    return Choice(frozenset(at_front if own_head or forward_fills_it else ()), num_steps, False)
