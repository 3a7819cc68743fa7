"""What to train inside a window within T_th, and what it costs (paper, section 4.1; algorithms A3, A21).

FedEL and ElasticTrainer choose tensors here; they and TimelyFL price their windows here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedel.core.selection import select
from fedel.core.selection_official import select_official
from fedel.core.timing import SLACK, fits, independent_updates, step_cost
from fedel.types import ModelSpec, StepCost, TimingProfile, Window

SELECTIONS = ("exact", "official")
"""``official`` is the dynamic programme of ElasticTrainer's reference code, with its rounding."""


def window_cost(spec: ModelSpec, profile: TimingProfile, selected: Collection[str], window: Window) -> StepCost:
    """Seconds of one step that trains ``selected`` inside ``window``."""
    exits = spec.exits_for(window.end, window.front)
    return step_cost(profile, selected, exits, window.end, spec.exit_each)


def probe_cost(spec: ModelSpec, profile: TimingProfile, window: Window) -> StepCost:
    """Seconds of the importance probe: two passes, forward and backward, over every tensor of the window."""
    every = {t.name for t in spec.weights_in(window.end, window.front)}
    once = window_cost(spec, profile, every, window)
    return StepCost(2 * once.forward_seconds, 2 * once.backward_seconds)


def less_probe(budget_seconds: float, probe_seconds: float, num_steps: int) -> float:
    """What is left of T_th for one step when the round's probe is paid out of it too.

    Half of it is kept for training: with few steps the probe would take all.

    >>> less_probe(10.0, probe_seconds=8.0, num_steps=4), less_probe(10.0, probe_seconds=8.0, num_steps=1)
    (8.0, 5.0)
    """
    return budget_seconds - min(probe_seconds / num_steps, budget_seconds / 2)


def choose(
    spec: ModelSpec,
    profile: TimingProfile,
    window: Window,
    importance: Mapping[str, float],
    budget_seconds: float,
    scope: str,
    dp: str,
) -> tuple[set[str], bool]:
    """The window's best tensors within the budget, and whether the step fits it.

    Something is always trained: if importance favours nothing, the cheapest tensor of the front block that
    fits. If nothing fits, the step is over budget. Where the forward pass by itself fills the budget, the
    front block is trained all the same: that adds little to what is spent already, and nothing else would come
    of it. Otherwise only the front's exit is trained.
    """

    def seconds(selected: Collection[str]) -> float:
        return window_cost(spec, profile, selected, window).total(scope)

    times = [profile.by_name[t.name] for t in spec.weights_in(window.end, window.front)]
    room = budget_seconds * (1 + SLACK) - seconds(())
    grads = [t.grad_seconds for t in times]
    updates = [t.update_seconds for t in times]
    if spec.exit_each:
        grads, updates = [0.0] * len(times), independent_updates(times)
    method = select if dp == "exact" else select_official
    chosen = method(grads, updates, [importance[t.name] for t in times], room) if room > 0 else []
    selected = {t.name for t, taken in zip(times, chosen, strict=False) if taken}
    if selected:
        return selected, fits(seconds(selected), budget_seconds)
    at_front = [t.name for t in times if t.block == window.front]
    cheapest = min(at_front, key=lambda name: seconds({name}))
    if fits(seconds({cheapest}), budget_seconds):
        return {cheapest}, True
    # At the last block the classifier is the exit: there is no other head to train in its place.
    own_head = window.front == spec.num_blocks or spec.exit_each
    forward_fills_it = scope == "train" and room <= 0
    return ({*at_front} if own_head or forward_fills_it else set()), False
