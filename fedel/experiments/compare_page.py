"""The report of a comparison: means and intervals over seeds, and below them every run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedel.experiments import compare
from fedel.experiments.compare import MethodFigures, Methods
from fedel.experiments.sections import shown
from fedel.experiments.stats import Estimate, estimate
from fedel.report import curves, page, plots
from fedel.report.about import facts
from fedel.report.figures import TextTable
from fedel.report.page import Page, PagePicture, PageTable
from fedel.report.runs import StoredRun

_BAND = (
    f"Lines are means over seeds of curves, each a mean over the last {curves.SMOOTH:.0%} of the time so far; "
    "bands are 95 % confidence intervals, where there is more than one seed."
)
_FIRST_SEED = ("loss", "client-time", "phases", "deviation", "tensors", "bytes")


def table(found: Sequence[MethodFigures]) -> TextTable:
    """One row per method."""
    megabytes = 1e-6
    rows = [
        [
            each.method,
            str(len(each.seeds)),
            compare.accuracy(each.same_time),
            compare.accuracy(each.same_rounds),
            shown(each.num_rounds.mean, 0),
            shown(each.seconds_per_round, 3),
            shown(each.seconds, 2),
            shown(megabytes * each.bytes_up.mean),
            shown(megabytes * each.bytes_down.mean),
        ]
        for each in found
    ]
    heads = ["method", "seeds", "same time", "same rounds", "rounds", "virtual s/round", "virtual s"]
    note = (
        "same time: accuracy when the shortest run of a seed ends, as a mean over the last quarter of that "
        f"time; same rounds: after as many rounds as all have, as a mean of the last {curves.IN_A_ROW} tests; "
        "virtual s: of all rounds; MB: of all clients and rounds, means over seeds. "
    )
    return TextTable([*heads, "MB up", "MB down"], rows, note + compare.interval_note(len(found[0].seeds)))


def pictures(methods: Methods) -> list[PagePicture]:
    """Means over seeds first; then, of the first seed, what the report of a run has."""
    named = {name: (title, picture, note) for name, title, picture, note in page.PICTURES}
    later: list[PagePicture] = []
    for name in _FIRST_SEED:
        title, picture, note = named[name]
        later.append((name, title, picture, f"Of the first seed. {note}"))
    return [
        ("accuracy-by-time", "Accuracy by time", lambda _: _by_time(methods), _BAND),
        ("accuracy-by-round", "Accuracy by round", lambda _: _by_round(methods), _BAND),
        *later,
    ]


def page_of(methods: Methods, title: str, failed: Sequence[str] = ()) -> Page:
    runs = [run for found in methods.values() for run in found]
    numbers = table(compare.figures(methods))
    known = facts(runs[0])
    shared = [said for name, said in known.items() if name in ("model", "data", "clients", "clock", "version")]
    return Page(
        title=title,
        about=[" · ".join(shared), *(f"Failed: {each}" for each in failed)],
        sentences=compare.sentences(methods),
        tables=[
            PageTable(numbers.heads, numbers.rows, note=numbers.note),
            *page.run_tables(runs, "Every run"),
        ],
        pictures=pictures(methods),
        drawn=first_seed(methods),
        runs=runs,
    )


def first_seed(methods: Methods) -> list[StoredRun]:
    return [found[0] for found in methods.values()]


def write(methods: Methods, directory: Path, title: str, failed: Sequence[str] = ()) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return page.write_page(page_of(methods, title, failed), directory)


def _by_time(methods: Methods) -> Figure:
    runs = [run for found in methods.values() for run in found]
    name, size = plots.time_axis(
        runs, max((sum(r.latency_seconds for r in run.rounds) for run in runs), default=0)
    )
    return _bands({k: [[(s / size, a) for s, a in run.curve()] for run in v] for k, v in methods.items()}, name)


def _by_round(methods: Methods) -> Figure:
    def curve(run: StoredRun) -> list[tuple[float, float]]:
        return curves.smoothed([(number + 1.0, value) for number, _, value in run.accuracies()])

    return _bands({label: [curve(run) for run in found] for label, found in methods.items()})


def _bands(lines: dict[str, list[list[tuple[float, float]]]], time_name: str = "") -> Figure:
    figure, axes = plots.figure_with()
    highest = 0.0
    for (label, seeds), colour in zip(lines.items(), plots.COLOURS * len(lines), strict=False):
        points = band([plots.drawable(curve) for curve in seeds])
        if not points:
            continue
        x = [where for where, _ in points]
        found = [Estimate(100 * e.mean, 100 * (e.half or 0.0), e.count) for _, e in points]
        # An accuracy is between 0 and 100 %, whatever Student's t says of three seeds.
        low, high = [max(0.0, e.low) for e in found], [min(100.0, e.high) for e in found]
        axes.plot(x, [e.mean for e in found], color=colour, label=label, linewidth=1.8)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        highest = max(highest, *high)
    if not axes.lines:
        return plots.empty("no round was tested")
    axes.set(ylabel="test accuracy (%)", xlim=(0, None), ylim=(0, min(104.0, 1.08 * highest) or 1.0))
    if time_name:
        axes.set_xlabel(time_name)
    else:
        plots.rounds_axis(axes)
    plots.legend_beside(figure, axes)
    return figure


def band(seeds: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, Estimate]]:
    """For each test that all seeds have: where it is on average, and the estimate of its value.

    >>> [(x, e.mean) for x, e in band([[(1.0, 10.0), (2.0, 30.0)], [(1.0, 20.0), (4.0, 20.0)]])]
    [(1.0, 15.0), (3.0, 25.0)]
    """
    return [
        (statistics.fmean(x for x, _ in test), estimate([value for _, value in test]))
        for test in zip(*seeds, strict=False)
    ]
