"""The sliding window over blocks (paper, section 4.1, figures 6 and 7; algorithms 22.2 and 22.3).

The front edge moves towards the output by as many blocks as the budget pays for; the end edge follows and
leaves behind the leading blocks in which nothing was selected. Past the last block the window starts again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from fedel.core.timing import SLACK, fits
from fedel.types import Window

VARIANTS = ("fedel", "disjoint", "no-rollback")
"""``disjoint`` is the paper's FedEL-C: the new window starts where the old one stopped."""


def advance(front: int, block_seconds: Sequence[float], budget: float, within: bool = False) -> int:
    """The new front edge: the first block at which the blocks added after ``front`` fill the budget.

    >>> advance(4, [1, 1, 1, 1, 2, 2, 2, 2, 2], budget=8)
    8
    >>> advance(0, [1, 9, 1], budget=20)
    3

    With ``within``, the last block that the budget still pays for, and at least one.

    >>> advance(0, [2, 2, 2, 2], budget=5), advance(0, [2, 2, 2, 2], budget=5, within=True)
    (3, 2)
    """
    spent = 0.0
    for block in range(front + 1, len(block_seconds) + 1):
        spent += block_seconds[block - 1]
        if within and not fits(spent, budget):
            return max(front + 1, block - 1)
        if not within and spent >= budget * (1 - SLACK):
            return block
    return len(block_seconds)


def slide(
    window: Window | None,
    selected_blocks: Collection[int],
    block_seconds: Sequence[float],
    budget: float,
    variant: str = "fedel",
    within: bool = False,
    in_memory: Callable[[Window], bool] = lambda _: True,
) -> Window:
    """The window of a client's next round, from its last one and the blocks it trained there.

    Nine equal blocks, three to a budget; then the window starts again:

    >>> w = slide(None, (), [1] * 9, budget=3); w
    Window(end=1, front=3)
    >>> w = slide(w, {1, 2, 3}, [1] * 9, budget=3); w
    Window(end=1, front=6)
    >>> w = slide(w, {4, 5, 6}, [1] * 9, budget=3); w
    Window(end=4, front=9)
    >>> slide(w, {7, 8, 9}, [1] * 9, budget=3)
    Window(end=1, front=3)

    ``within`` keeps the new blocks inside the budget instead of just above it.

    Leading blocks without a selected tensor are left behind (figure 7c: blocks 2 and 3, so 4 comes next).

    >>> slide(Window(2, 5), {4, 5}, [1] * 9, budget=2)
    Window(end=4, front=7)

    ``in_memory`` says whether a window fits the device's memory (``shrink``).
    """
    if variant not in VARIANTS:
        raise ValueError(f"window variant {variant!r} is not one of: {', '.join(VARIANTS)}")
    last = len(block_seconds)
    if window is not None and window.front >= last and variant == "no-rollback":
        return shrink(window, last, last, in_memory)
    if window is None or window.front >= last:
        return shrink(Window(1, advance(0, block_seconds, budget, within)), 1, last, in_memory)
    end = window.front + 1 if variant == "disjoint" or not selected_blocks else min(selected_blocks)
    wanted = Window(end, advance(window.front, block_seconds, budget, within))
    return shrink(wanted, window.front + 1, last, in_memory)


def whole_window(window: Window | None, last: int, in_budget: Callable[[Window], bool]) -> Window:
    """The blocks behind ``window``, as many as the budget pays for as a whole, one at least; after the last
    block it starts again.

    >>> w = whole_window(None, 5, lambda w: w.front - w.end < 2); w
    Window(end=1, front=2)
    >>> w = whole_window(w, 5, lambda w: False); w
    Window(end=3, front=3)
    >>> whole_window(w, 5, lambda w: True)
    Window(end=4, front=5)

    A window may fit although a smaller one does not: an early exit can cost more than all blocks behind it.

    >>> whole_window(None, 5, lambda w: w.front != 4)
    Window(end=1, front=5)
    """
    end = 1 if window is None or window.front >= last else window.front + 1
    fronts = (front for front in range(last, end, -1) if in_budget(Window(end, front)))
    return Window(end, next(fronts, end))


def shrink(wanted: Window, first_front: int, last: int, in_memory: Callable[[Window], bool]) -> Window:
    """The window nearest to ``wanted`` that fits the memory: with fewer new blocks, one at least; else with
    fewer old ones; else at the next block that fits by itself. Where none does, ``wanted`` as it is.

    >>> shrink(Window(1, 6), first_front=4, last=9, in_memory=lambda w: w.front - w.end < 5)
    Window(end=1, front=5)
    >>> shrink(Window(1, 6), first_front=4, last=9, in_memory=lambda w: w.front - w.end < 2)
    Window(end=3, front=4)
    >>> shrink(Window(1, 6), first_front=4, last=9, in_memory=lambda w: w.end == w.front == 7)
    Window(end=7, front=7)
    """
    fewer_new = (Window(wanted.end, front) for front in range(wanted.front, first_front - 1, -1))
    fewer_old = (
        Window(end, front) for front in range(first_front, last + 1) for end in range(wanted.end, front + 1)
    )
    return next((window for window in (*fewer_new, *fewer_old) if in_memory(window)), wanted)
