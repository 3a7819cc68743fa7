"""The pictures of the experiments, as SVG text, in the same style as the report of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedel.experiments.outcomes import Outcome
from fedel.experiments.stats import Estimate
from fedel.report import client_plots, plots
from fedel.report.runs import StoredRun

COLOURS = plots.COLOURS
LABELS_IN_A_ROW = 90
"""Letters under an axis that fit without turning them."""


def draw(picture: Callable[[Any], Any], width: float = 7.2, height: float = 3.6, **axes: Any) -> str:
    """SVG of what ``picture`` draws into the given axes."""

    def figure(_: Sequence[StoredRun]) -> Figure:
        made = Figure(figsize=(width, height), layout="constrained")
        picture(made.subplots(**axes))
        return made

    return plots.draw(figure, ())


def curves(methods: Mapping[str, Sequence[Outcome]], target: float | None = None) -> str:
    """Metric over virtual time, one line per method: the mean over its seeds."""

    def picture(axes: Any) -> None:
        for i, (label, outcomes) in enumerate(methods.items()):
            seconds, _, values, _ = band([outcome.curve for outcome in outcomes])
            axes.plot(
                [s / 60 for s in seconds],
                values,
                color=COLOURS[i % len(COLOURS)],
                linestyle="-" if i < len(COLOURS) else (0, (3, 1)),
                linewidth=2.2 if label == "fedel" else 1.2,
                label=label,
            )
        if target is not None:
            axes.axhline(target, color="black", linestyle="--", linewidth=0.8)
        metric = next(iter(methods.values()))[0].metric
        axes.set(xlabel="virtual training time (minutes)", xlim=(0, None))
        axes.set_ylabel("test accuracy (%)" if metric == "accuracy" else "test perplexity")
        if metric == "perplexity":
            axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8, ncols=2)

    return draw(picture)


def over_time(panels: Mapping[str, tuple[Mapping[str, Sequence[Outcome]], str]], target: float) -> str:
    """Metric over time, side by side for each clock: the mean over seeds and a band from lowest to highest.

    The first line is the one to look at; it is compared with FedAvg at a share ``target`` of FedAvg's plateau.
    """

    def picture(grid: Any) -> None:
        for number, (axes, (title, (lines, scope))) in enumerate(zip(grid[0], panels.items(), strict=True)):
            fedavg = lines.get("FedAvg", ())
            whole = statistics.fmean(o.seconds(scope) for o in fedavg) / 100 if fedavg else 1.0
            for name, outcomes in lines.items():
                look = LOOKS.get(name, LOOKS["other"])
                seconds, low, middle, high = band([o.curve_on(scope) for o in outcomes])
                times = [s / whole for s in seconds]
                axes.plot(times, middle, label=name, **look)
                axes.fill_between(times, low, high, color=look["color"], alpha=0.13, linewidth=0)
            axes.set(title=title, xlim=(0, None))
            axes.set_xlabel("training time (% of FedAvg's run)" if fedavg else "training time (seconds)")
            _mark(axes, lines, scope, whole, target)
            outcome = next(iter(lines.values()))[0] if lines else None
            if outcome is not None and outcome.lower_is_better:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_formatter("{x:g}")
            if fedavg:
                # What lies far from the target is the first rounds, where nobody has learnt anything.
                goal, bottom = statistics.fmean(o.target(target) for o in fedavg), axes.get_ylim()[0]
                limits = (
                    {"top": goal / STEEP}
                    if fedavg[0].lower_is_better
                    else {"bottom": max(bottom, goal * STEEP)}
                )
                axes.set_ylim(**limits)
            if number == 0 and outcome is not None:
                axes.set_ylabel("test perplexity" if outcome.lower_is_better else "test accuracy (%)")
        handles = dict(zip(*reversed(grid[0][0].get_legend_handles_labels()), strict=True))
        grid[0][0].figure.legend(handles.values(), handles, frameon=False, loc="outside lower center", ncols=3)

    return draw(picture, width=9.6, height=4.4, ncols=len(panels), sharey=True, squeeze=False)


STEEP = 0.6
"""Share of the target below which a picture does not begin."""
LOOKS: Mapping[str, Any] = {
    "FedEL, preset": {"color": COLOURS[0], "linewidth": 2.6, "zorder": 5},
    "FedEL as in the paper": {"color": COLOURS[0], "linewidth": 1.3, "linestyle": (0, (4, 1.5))},
    "FedAvg": {"color": COLOURS[1], "linewidth": 2.2, "zorder": 4},
    "control: fewer steps on slow devices": {"color": COLOURS[2], "linewidth": 1.3},
    "control: fewer steps, improved": {"color": COLOURS[2], "linewidth": 1.3, "linestyle": (0, (4, 1.5))},
    "control: only the fast devices": {"color": COLOURS[3], "linewidth": 1.3},
    "other": {"color": COLOURS[4], "linewidth": 1.3},
}


def _mark(axes: Any, lines: Mapping[str, Sequence[Outcome]], scope: str, whole: float, share: float) -> None:
    """An arrow from when the first line reaches the target to when FedAvg does, with how many times sooner."""
    first, fedavg = next(iter(lines.values()), ()), lines.get("FedAvg", ())
    if not fedavg:
        return
    target = statistics.fmean(o.target(share) for o in fedavg)
    axes.axhline(target, color="black", linestyle=":", linewidth=0.8)
    ours, theirs = ([o.seconds_to(target, scope) / whole for o in runs] for runs in (first, fedavg))
    if first is fedavg or math.inf in (*ours, *theirs) or not ours:
        return
    here, there = statistics.fmean(ours), statistics.fmean(theirs)
    arrow = {"arrowstyle": "->", "linewidth": 1.6}
    axes.annotate("", (here, target), (there, target), arrowprops=arrow, zorder=7)
    word = f"{there / here:.1f} x sooner" if there >= here else f"{here / there:.1f} x later"
    behind = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}
    below = {"xytext": (0, -8), "textcoords": "offset points", "ha": "center", "va": "top"}
    axes.annotate(word, ((here + there) / 2, target), **below, weight="bold", bbox=behind, zorder=7)


def band(
    curves: Sequence[Sequence[tuple[float, float]]],
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Mean seconds, lowest, mean and highest value over seeds, for each test.

    >>> band([[(1.0, 10.0), (2.0, 30.0)], [(1.0, 20.0), (4.0, 20.0)]])
    ([1.0, 3.0], [10.0, 20.0], [15.0, 25.0], [20.0, 30.0])
    """
    tests = list(zip(*curves, strict=False))
    values = [[v for _, v in test] for test in tests]
    return (
        [statistics.fmean(s for s, _ in test) for test in tests],
        [min(v) for v in values],
        [statistics.fmean(v) for v in values],
        [max(v) for v in values],
    )


def bars(groups: Mapping[str, Mapping[str, Estimate]], ylabel: str, line: float | None = None) -> str:
    """Groups of bars, with their intervals."""

    def picture(axes: Any) -> None:
        series = list(dict.fromkeys(name for group in groups.values() for name in group))
        width, middle = 0.8 / len(series), (len(series) - 1) / 2
        for i, (name, colour) in enumerate(zip(series, COLOURS * 2, strict=False)):
            places = [g + (i - middle) * width for g, group in enumerate(groups.values()) if name in group]
            found = [group[name] for group in groups.values() if name in group]
            axes.bar(
                places,
                [e.mean for e in found],
                width,
                yerr=[e.half or 0.0 for e in found],
                color=colour,
                label=name,
                error_kw={"linewidth": 1},
            )
        if line is not None:
            axes.axhline(line, color="black", linestyle="--", linewidth=0.8)
        axes.set_xticks(range(len(groups)), list(groups))
        if sum(map(len, groups)) > LABELS_IN_A_ROW:
            for label in axes.get_xticklabels():
                label.set(rotation=25, fontsize=8, ha="right", rotation_mode="anchor")
        axes.set_ylabel(ylabel)
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=8)

    return draw(picture, height=2.9)


def boxes(values: Mapping[str, Sequence[float]], ylabel: str) -> str:
    """One box per method, over its seeds."""

    def picture(axes: Any) -> None:
        axes.boxplot(list(values.values()), tick_labels=list(values), medianprops={"color": COLOURS[1]})
        axes.set_ylabel(ylabel)
        axes.tick_params(axis="x", labelrotation=20, labelsize=8)

    return draw(picture, height=2.9)


def heat(rows: Mapping[str, Sequence[float]], xlabel: str, label: str) -> str:
    """A row of colours for each entry."""

    def picture(axes: Any) -> None:
        image = axes.imshow(
            list(rows.values()), aspect="auto", cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest"
        )
        axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
        axes.set(xlabel=xlabel)
        axes.grid(visible=False)
        axes.figure.colorbar(image, label=label)

    return draw(picture)


def selection(outcome: Outcome) -> str:
    """Rounds against tensors, for each client or one per device type."""
    return plots.draw(client_plots.selection_map, [outcome.report])
