"""The pictures of a report about whole runs. Each function draws one picture from the runs it is given.

Values that no axis can hold are left out; a picture without any value says so.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedel.report import curves
from fedel.report.figures import labels
from fedel.report.runs import StoredRun
from fedel.report.words import clock, same_clock

COLOURS = ("#0b6e4f", "#c8553d", "#30638e", "#b58900", "#6c4675", "#5a7d7c", "#8c2f39", "#3d405b")
WIDTH = 7.2
"""Inches."""
_SOFT = "#5c6773"
MAX_DRAWN = 1e100
"""Larger values, of a run that diverged or a damaged file, have no place on an axis."""
FORMATS = ("pdf", "png", "svg")
_METADATA = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
"""So that the same run gives the same file."""
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedel",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "savefig.dpi": 200,
}

Picture = Callable[[Sequence[StoredRun]], Figure]


def figure_with(width: float = WIDTH, height: float = 3.6, **axes: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**axes)


def draw(picture: Picture, runs: Sequence[StoredRun]) -> str:
    """A picture as SVG text."""
    text = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        picture(runs).savefig(text, format="svg", metadata=_METADATA["svg"])
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def save(picture: Picture, runs: Sequence[StoredRun], file: Path) -> None:
    """A picture as a file; the format is that of its name."""
    kind = file.suffix.removeprefix(".")
    with matplotlib.rc_context(_STYLE):
        picture(runs).savefig(file, format=kind, metadata=_METADATA.get(kind))


def can_be_drawn(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= MAX_DRAWN


def drawable(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if y is not None and can_be_drawn(x) and can_be_drawn(y)]


def nothing(axes: Any, why: str) -> None:
    """Say in one of several parts of a picture why it is empty."""
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, color=_SOFT, fontsize=8)
    # Not set_yticks: parts of a picture share their axis.
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    axes.grid(visible=False)


def empty(why: str) -> Figure:
    """A picture without values: one line of text."""
    figure, axes = figure_with(height=0.5)
    axes.set_axis_off()
    axes.text(0, 0.5, why, va="center", transform=axes.transAxes, color=_SOFT)
    return figure


def rounds_axis(axes: Any) -> None:
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_beside(figure: Figure, axes: Any) -> None:
    """Outside of the axes, so that it hides no curve."""
    handles, names = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, frameon=False, fontsize=8, loc="outside right upper")


def time_axis(runs: Sequence[StoredRun], longest: float) -> tuple[str, float]:
    """Name of an axis of time, and the seconds of its unit."""
    unit, size = next(((u, s) for u, s in (("h", 3600.0), ("min", 60.0)) if longest >= 5 * s), ("s", 1.0))
    kind, _, counts = clock(runs[0]).partition(", ") if same_clock(runs) else ("", "", "of different clocks")
    return f"{kind} time ({unit}{f'; {counts}' if counts else ''})".strip(), size


def accuracy_by_time(runs: Sequence[StoredRun]) -> Figure:
    longest = max((seconds for run in runs for seconds in run.seconds() if can_be_drawn(seconds)), default=0.0)
    name, size = time_axis(runs, longest)
    return _accuracy(runs, [[(s / size, a) for _, s, a in run.accuracies()] for run in runs], name)


def accuracy_by_round(runs: Sequence[StoredRun]) -> Figure:
    return _accuracy(runs, [[(n + 1, a) for n, _, a in run.accuracies()] for run in runs])


def _accuracy(
    runs: Sequence[StoredRun], tests: Sequence[list[tuple[float, float]]], time_name: str = ""
) -> Figure:
    """Every test as a dot, the smoothed curve as a line, and where guessing is; by round without a name."""
    figure, axes = figure_with()
    highest = 0.0
    for label, points, colour in zip(labels(runs), tests, COLOURS * len(runs), strict=False):
        shown = drawable((x, 100 * y) for x, y in points)
        if shown:
            axes.plot(*zip(*shown, strict=True), ".", color=colour, alpha=0.35, markersize=5)
            axes.plot(*zip(*curves.smoothed(shown), strict=True), color=colour, label=label, linewidth=1.8)
            highest = max(highest, *(y for _, y in shown))
    if not axes.lines:
        return empty("no round was tested")
    known = {run.num_classes for run in runs if run.num_classes}
    if len(known) == 1:
        chance = 100 / known.pop()
        axes.axhline(chance, color=_SOFT, linestyle=":", linewidth=1, label=f"chance, {chance:.3g} %")
        highest = max(highest, chance)
    axes.set(ylabel="test accuracy (%)", xlim=(0, None), ylim=(0, 1.08 * highest or 1.0))
    if time_name:
        axes.set_xlabel(time_name)
    else:
        rounds_axis(axes)
    legend_beside(figure, axes)
    return figure


def loss_by_round(runs: Sequence[StoredRun]) -> Figure:
    figure, axes = figure_with(height=2.8)
    values: list[float] = []
    for label, run, colour in zip(labels(runs), runs, COLOURS * len(runs), strict=False):
        for name, style, points in (
            ("training", "-", [(r.round + 1, r.loss) for r in run.rounds]),
            ("test", ":", [(r.round + 1, r.test_loss) for r in run.rounds]),
        ):
            if shown := drawable(points):
                marker = "." if len(shown) == 1 else ""
                axes.plot(
                    *zip(*shown, strict=True), style, marker=marker, color=colour, label=f"{label}, {name}"
                )
                values += [y for _, y in shown]
    if not values:
        return empty("no round has a loss")
    axes.set_ylabel("loss")
    if min(values) > 0 and max(values) > 30 * statistics.median(values):
        axes.set_yscale("log")
    rounds_axis(axes)
    legend_beside(figure, axes)
    return figure


def bytes_by_round(runs: Sequence[StoredRun]) -> Figure:
    """Equal curves are one curve, with all their names."""
    figure, axes = figure_with(height=2.8)
    styles: dict[tuple[tuple[float, float], ...], tuple[str, str]] = {}
    names: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for label, run, colour in zip(labels(runs), runs, COLOURS * len(runs), strict=False):
        for way, style in (("up", "-"), ("down", ":")):
            curve = tuple(
                (float(r.round + 1), (r.bytes_up if way == "up" else r.bytes_down) / 1e6) for r in run.rounds
            )
            if curve:
                styles.setdefault(curve, (style, colour))
                names.setdefault(curve, []).append(f"{label} {way}")
    if not styles:
        return empty("no round is closed")
    for curve, (style, colour) in styles.items():
        marker = "." if len(curve) == 1 else ""
        label = "\n= ".join(names[curve])
        axes.plot(*zip(*curve, strict=True), style, marker=marker, color=colour, label=label)
    axes.set(ylabel="megabytes, all clients", ylim=(0, None))
    rounds_axis(axes)
    legend_beside(figure, axes)
    return figure
