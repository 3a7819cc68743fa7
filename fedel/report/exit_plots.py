"""The early exits of trained models in a report: what each is worth, and the time that it takes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from fedel.report.figures import labels
from fedel.report.plots import COLOURS, can_be_drawn, empty, figure_with, legend_beside
from fedel.report.runs import StoredRun
from fedel.report.words import percent

HEADS = ["method", "exit", "after block", "accuracy", "parameters", "size (kB)", "ms per sample"]
_WIDE = 20.0
"""Exits of which the slowest takes this many times as long as the fastest have an axis of powers."""


def accuracy_by_exit(runs: Sequence[StoredRun]) -> Figure:
    """Accuracy against milliseconds, one line per run, a dot with its number for each exit."""
    figure, axes = figure_with(height=3.0)
    slowest, fastest = 0.0, float("inf")
    for label, run, colour in zip(labels(runs), runs, COLOURS * len(runs), strict=False):
        points = [
            (row.ms_per_sample, 100 * row.accuracy, row.exit)
            for row in (run.exits.exits if run.exits else ())
            if can_be_drawn(row.ms_per_sample) and can_be_drawn(row.accuracy)
        ]
        if not points:
            continue
        times, accuracies, exits = zip(*points, strict=True)
        axes.plot(times, accuracies, "o-", color=colour, label=label, linewidth=1.2, markersize=5)
        for at, accuracy, exit in zip(times, accuracies, exits, strict=True):
            axes.annotate(str(exit), (at, accuracy), xytext=(5, 4), textcoords="offset points", fontsize=8)
        slowest, fastest = max(slowest, *times), min(fastest, *times)
    if not axes.lines:
        return empty("the exits have no numbers that can be drawn")
    if 0 < _WIDE * fastest < slowest:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    else:
        axes.set_xlim(left=0)
    axes.set(xlabel="ms per sample", ylabel="test accuracy (%)", ylim=(0, 1.1 * axes.dataLim.ymax or 1.0))
    legend_beside(figure, axes)
    return figure


def rows(runs: Sequence[StoredRun]) -> list[list[str]]:
    """For the table of the report."""
    return [
        [
            label,
            str(row.exit),
            row.block,
            percent(row.accuracy),
            f"{row.num_parameters:,}",
            f"{row.num_bytes // 1000:,}",
            f"{row.ms_per_sample:.3g}",
        ]
        for label, run in zip(labels(runs), runs, strict=True)
        for row in (run.exits.exits if run.exits else ())
    ]


def note(runs: Sequence[StoredRun]) -> str:
    """Which models, and where they were measured."""
    measured = [
        f"{label}: the model of round {found.round} on {found.machine}, "
        + ("one sample per call" if found.batch_size == 1 else f"{found.batch_size} samples per call")
        for label, run in zip(labels(runs), runs, strict=True)
        if (found := run.exits)
    ]
    return f"Each exit is a smaller model: fedel export RUN --exit K. One thread. {'; '.join(measured)}."
