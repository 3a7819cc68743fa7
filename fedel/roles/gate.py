"""The gate: what a member of the federation says is checked here before anything else looks at it.

Each function holds one message against what the run knows (the model, the join, the task) and returns what
is wrong with it, for people; an empty text lets it pass. Every number is finite and in a range, every name is
one of the model's, every text is bounded. Inside the gate values are trusted. Coordinator and aggregators use
the same checks, so that a client can lose its own place in a round and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from fedel.types import ModelSpec, Participant, Report, Window

MAX_SECONDS = 1e7
"""About four months: longer than any round, far from where sums of seconds lose their meaning."""
MAX_BYTES = 2**50
MAX_COUNT = 2**31 - 1
MAX_NUMBER = 1e30
"""Losses and norms beyond this mean that training diverged."""
MAX_NAME = 200
MAX_TEXT = 1000
MAX_TRACE = 8000
"""Letters of a traceback."""
DIVERGED = "training diverged"
"""In every text that says so, so that a run can name it to people."""


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """A text of a member as it may be shown and logged: printable, on one line, and cut.

    >>> clean("too\\nlong \\x1b[2J", limit=6)
    'too lo...'
    """
    cut = text[: limit + 1]
    shown = "".join(letter if letter.isprintable() else " " for letter in cut[:limit])
    return shown + "..." if len(cut) > limit else shown


def clean_lines(text: str, limit: int = MAX_TRACE) -> str:
    """The same for a text of several lines, such as a traceback, whose end says most.

    >>> clean_lines("first\\nsecond\\x1b[2J\\nthird", limit=18)
    '...\\nsecond [2J\\nthird'
    """
    cut = text[-limit - 1 :] if len(text) > limit else text
    lines = cut.split("\n")
    if len(cut) > limit:
        lines = ["...", *lines[1:]] if len(lines) > 1 else [cut[1:]]
    return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)


def objection_to_name(name: str, what: str = "name") -> str:
    """Client names, device types and versions: something printable of bounded length."""
    if 0 < len(name) <= MAX_NAME and name.isprintable():
        return ""
    return (
        f"the {what} has {len(name)} letters or some that cannot be printed: use 1 to {MAX_NAME} printable ones"
    )


def objection_to_numbers(numbers: Mapping[str, float], most: float, least: float = 0.0) -> str:
    """All of them from ``least`` to ``most``, so neither NaN nor infinite."""
    for name, number in numbers.items():
        if not (math.isfinite(number) and least <= number <= most):
            return f"{name} is {number:g}, which is not between {least:g} and {most:g}"
    return ""


def objection_to_report(report: Report, spec: ModelSpec, participant: Participant) -> str:
    """``spec`` is the whole model, not one shard's part of it."""
    if report.client != participant.client or report.round_num != participant.round_num:
        return (
            f"the report is of client '{clean(report.client, MAX_NAME)}' and round {report.round_num}, the task"
            f" of client '{participant.client}' and round {participant.round_num}"
        )
    diverging = {"loss": abs(report.loss), "loss_square": report.loss_square, "update_norm": report.update_norm}
    if objection := objection_to_numbers(diverging, MAX_NUMBER):
        return f"{objection}: {DIVERGED}, try a lower learning rate"
    return (
        objection_to_numbers({"num_steps": report.num_steps}, participant.max_steps)
        or objection_to_numbers({"effective_steps": report.effective_steps}, participant.max_effective_steps)
        or objection_to_numbers({"last_share": report.last_share}, 1.0)
        or objection_to_numbers(
            {
                "forward_seconds": report.cost.forward_seconds,
                "backward_seconds": report.cost.backward_seconds,
                "probe_forward_seconds": report.probe.forward_seconds,
                "probe_backward_seconds": report.probe.backward_seconds,
                "train_seconds": report.train_seconds,
                "probe_seconds": report.probe_seconds,
                "step_seconds": report.step_seconds,
            },
            MAX_SECONDS,
        )
        or objection_to_numbers({"peak_memory_bytes": report.peak_memory_bytes}, MAX_BYTES)
        or objection_to_numbers({"resets": report.resets, "rounds_held": report.rounds_held}, MAX_COUNT)
        or objection_to_window(report.window, spec)
        or _objection_to_selected(report, spec)
    )


def objection_to_window(window: Window | None, spec: ModelSpec) -> str:
    if window is not None and not 1 <= window.end <= window.front <= spec.num_blocks:
        return f"its window is blocks {window.end} to {window.front}, the model has {spec.num_blocks}"
    return ""


def _objection_to_selected(report: Report, spec: ModelSpec) -> str:
    names = set(report.selected)
    if len(names) != len(report.selected) or not names <= {tensor.name for tensor in spec.weights}:
        return "it selected tensors that the model does not have, or one of them twice"
    return ""


def objection_to_wanted(places: Sequence[int], versions: Sequence[int], spec: ModelSpec) -> str:
    """The tensors that a caller needs, by their places in the whole model, and the version it holds of each."""
    if len(places) != len(versions):
        return f"it needs {len(places)} tensors and holds versions of {len(versions)}: name one for each"
    most = len(spec.tensors)
    if places and (len(places) > most or min(places) < 0 or max(places) >= most):
        return f"it needs tensors at places that the model does not have: they go from 0 to {most - 1}"
    if any(after <= before for before, after in pairwise(places)):
        return "it names a tensor twice, or not in forward order"
    return ""


def weighed(report: Report, participant: Participant) -> Report:
    """The report with the weight from the client's join, whatever it says about itself later."""
    return replace(report, num_samples=participant.num_samples)
