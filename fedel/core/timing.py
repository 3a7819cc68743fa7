"""What a training step costs, from a timing profile (paper, section 4.1; algorithms 2.2, A1, A3).

A step costs the forward pass of every block up to the exit used, the exit itself, and

    T_bw(A) = sum of update seconds of the selected tensors
            + sum of grad seconds of the tensors deeper than the shallowest selected one,

because the gradient must pass through everything between the loss and the shallowest tensor it has to
reach, and no further.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from fedel.errors import ConfigError
from fedel.types import StepCost, TensorTime, TimingProfile

SLACK = 1e-9
"""The one tolerance against rounding. The fastest device's whole step *is* T_th, so sums of the same seconds
are compared with each other all the time; adding n of them in another order changes the result by at most
n * 1e-16 of it. 1e-9 covers a million tensors, and no device is timed that precisely."""

OUTLIER = 10.0
"""A device more than this many times faster than the median is not believed to be the fastest."""

SCOPES = ("backward", "train", "round")
"""What counts against T_th: only the backward pass, as in the paper's simulation; the whole step; or all that
a client does in a round: download, probe, steps, upload."""
STEP_SCOPES = ("backward", "train")
"""Those of methods that price single steps only."""


def fits(seconds: float, budget_seconds: float) -> bool:
    """Whether work keeps a budget, rounding set aside.

    >>> fits(0.1 + 0.2, 0.3), fits(0.3001, 0.3)
    (True, False)
    """
    return seconds <= budget_seconds * (1 + SLACK)


def backward_seconds(
    grad_seconds: Sequence[float], update_seconds: Sequence[float], selected: Sequence[bool]
) -> float:
    """T_bw(A) of tensors in forward order.

    The paper's example, tensors 2 and 4 of five: t_g5 + t_w4 + t_g4 + t_g3 + t_w2.

    >>> backward_seconds([1, 2, 4, 8, 16], [100, 200, 400, 800, 1600], [False, True, False, True, False])
    1028
    >>> backward_seconds([1, 2], [10, 20], [False, False])
    0
    """
    if True not in selected:
        return 0
    shallowest = list(selected).index(True)
    return sum(grad_seconds[shallowest + 1 :]) + sum(
        seconds for seconds, chosen in zip(update_seconds, selected, strict=True) if chosen
    )


def block_seconds(profile: TimingProfile, scope: str = "backward") -> list[float]:
    """T^b: seconds of each block, the unit of windows; except in scope ``backward`` its forward pass counts.

    They add up to ``full_step``: the way through the first tensor leads to the data, so nobody computes it.
    """
    seconds = [0.0 if scope == "backward" else block.forward_seconds for block in profile.blocks]
    for number, tensor in enumerate(profile.tensors):
        seconds[tensor.block - 1] += tensor.update_seconds + (tensor.grad_seconds if number else 0.0)
    return seconds


def step_cost(
    profile: TimingProfile,
    selected: Collection[str],
    exits: Sequence[int],
    end: int = 1,
    exit_each: bool = False,
    frozen_share: float = 1.0,
) -> StepCost:
    """Seconds of one step that trains ``selected`` through ``exits``, with blocks below ``end`` frozen.

    ``frozen_share`` is the share of the round's steps in which the frozen blocks run (``core.prefix``).
    """
    front = max(exits)
    # Below the window batch norm runs in evaluation mode, which is cheaper; 0 means that was not measured.
    frozen = sum(b.frozen_forward_seconds or b.forward_seconds for b in profile.blocks[: end - 1])
    forward = frozen * frozen_share
    forward += sum(b.forward_seconds for b in profile.blocks[end - 1 : front])
    forward += sum(profile.blocks[b - 1].exit_forward_seconds for b in exits) + profile.overhead_seconds
    backward = sum(profile.blocks[b - 1].exit_backward_seconds for b in exits)
    window = [t for t in profile.tensors if end <= t.block <= front]
    # Exits on a frozen trunk are chains of their own; otherwise the whole window is one chain.
    chains = [[t for t in window if t.block == b] for b in exits] if exit_each else [window]
    for chain in chains:
        backward += backward_seconds(
            [t.grad_seconds for t in chain],
            [t.update_seconds for t in chain],
            [t.name in selected for t in chain],
        )
    return StepCost(forward, backward)


def full_step(profile: TimingProfile, exit_each: bool = False) -> StepCost:
    """One step of the whole model through its own classifier: the paper's "full model training time".

    On a frozen trunk, where each block trains through its own exit, that is every exit.
    """
    last = len(profile.blocks)
    every = {tensor.name for tensor in profile.tensors}
    return step_cost(profile, every, range(1, last + 1) if exit_each else (last,), exit_each=exit_each)


def full_steps(profiles: Sequence[TimingProfile], scope: str = "train") -> list[float]:
    """Seconds of such a step on each device, as ``budget`` takes them."""
    return [full_step(profile).total(scope) for profile in profiles]


def width_step(profile: TimingProfile, width: float) -> StepCost:
    """One step of the model narrowed to a share ``width`` of its channels.

    Measured where the profile has it, interpolated in between. Without a measurement, cost is taken as
    proportional to the multiplications, width squared: an optimist's figure on real kernels.
    """
    full = full_step(profile)
    points = sorted({(w.width, w.forward_seconds, w.backward_seconds) for w in profile.widths})
    if width >= 1:
        return full
    if not points:
        return StepCost(full.forward_seconds * width**2, full.backward_seconds * width**2)
    points.append((1.0, full.forward_seconds, full.backward_seconds))
    below = max((p for p in points if p[0] <= width), default=(0.0, 0.0, 0.0))
    above = min(p for p in points if p[0] >= width)
    share = 0.0 if above[0] == below[0] else (width - below[0]) / (above[0] - below[0])
    return StepCost(*(low + share * (high - low) for low, high in zip(below[1:], above[1:], strict=True)))


def independent_updates(tensors: Sequence[TensorTime]) -> list[float]:
    """Update seconds of tensors on independent exits, each charged the way through its own exit.

    An upper bound when several tensors of one exit are chosen, so a budget that holds it holds in truth.
    """
    return [
        t.update_seconds + sum(d.grad_seconds for d in tensors[i + 1 :] if d.block == t.block)
        for i, t in enumerate(tensors)
    ]


def fastest_seconds(seconds: Sequence[float]) -> float:
    """The least of the sorted seconds, those below a tenth of the median of three or more left out.

    Devices of one fleet differ by less than that, so such a figure is a wrong measurement or a lie, and it
    would take the work of everyone else away.

    >>> fastest_seconds([1.0, 2.0, 4.0]), fastest_seconds([0.004, 2.0, 4.0]), fastest_seconds([0.004, 4.0])
    (1.0, 2.0, 0.004)
    """
    least = statistics.median(seconds) / OUTLIER if len(seconds) >= 3 else 0.0
    return next(each for each in seconds if each >= least)


def budget(seconds: Sequence[float], policy: str = "fastest", value: float = 0.0) -> float:
    """T_th of one step, from the seconds that each device takes for a step of the whole model.

    ``fastest`` takes the fastest device; ``percentile`` the device that ``value`` percent are as fast as;
    ``fixed`` is ``value`` seconds; ``share`` is ``value`` times the fastest device. A device that cannot be
    that fast (``fastest_seconds``) does not count as the fastest.
    """
    if policy == "fixed":
        if value <= 0:
            raise ConfigError(f"budget policy 'fixed' needs seconds above 0, not {value:g}: set budget.value")
        return value
    if not seconds:
        raise ConfigError(f"budget policy '{policy}' needs at least one client with a timing profile")
    seconds = sorted(seconds)
    if policy == "fastest":
        return fastest_seconds(seconds)
    if policy == "share":
        return fastest_seconds(seconds) * value
    if policy == "percentile" and 0 <= value <= 100:
        return seconds[max(0, math.ceil(value / 100 * len(seconds)) - 1)]
    raise ConfigError(
        f"budget policy {policy!r} with value {value:g} is not one of: fastest, percentile (0 to 100), "
        "share (of the fastest device), fixed (seconds)"
    )
