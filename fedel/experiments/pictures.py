"""The pictures of the experiments, as SVG text, in the same style as the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedel.experiments.outcomes import Outcome
from fedel.experiments.stats import Estimate
from fedel.report import client_plots, plots
from fedel.report.runs import StoredRun

COLOURS = plots.COLOURS


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
            seconds, values = mean_curve(outcomes)
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


def mean_curve(outcomes: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    """Mean time and metric over seeds, for each test."""
    tests = list(zip(*(outcome.curve for outcome in outcomes), strict=False))
    count = len(outcomes)
    return [sum(s for s, _ in t) / count for t in tests], [sum(v for _, v in t) / count for t in tests]


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
