"""The pictures of a report about single clients: their time, where it went, and what they trained."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedel.report.figures import labels
from fedel.report.plots import (
    COLOURS,
    WIDTH,
    can_be_drawn,
    drawable,
    empty,
    figure_with,
    legend_beside,
    nothing,
    rounds_axis,
)
from fedel.report.runs import StoredRun
from fedel.report.words import clock, plural, seconds_name

PHASE_COLOURS = {
    "download": "#30638e",
    "probe": "#b58900",
    "train": "#0b6e4f",
    "wait": "#c8553d",
    "upload": "#7fa7c9",
    "idle": "#dddddd",
    "commit": "#6c4675",
}
"""In the order of time."""
NUM_ROUNDS_SHOWN, NUM_BARS = 10, 16
FEW_CLIENTS = 8
"""Up to this many, each client has a colour or a map of its own; otherwise each device type has."""
MAPS_PER_ROW, PANELS_PER_ROW = 4, 3
_NO_ROUND = "no client's update counted"


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted as people count.

    >>> in_order(["c-10", "c-2", "orin/4", "orin"])
    ['c-2', 'c-10', 'orin', 'orin/4']
    """
    return sorted(names, key=lambda name: [(int(p), "") if p.isdigit() else (-1, p) for p in _parts(name)])


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"(\d{1,18})", name) if part]


def groups(runs: Sequence[StoredRun]) -> dict[str, str]:
    """Of each client, what gives it its colour: its device type, or its name where all have the same type."""
    types = {client: device for run in runs for client, device in run.device_types().items()}
    if len(set(types.values())) == 1 and len(types) <= FEW_CLIENTS:
        return {client: client for client in types}
    return {client: device or "other" for client, device in types.items()}


def time_by_client(runs: Sequence[StoredRun]) -> Figure:
    """The seconds of every client that count as dots, the median of each group as a line, and T_th."""
    group_of = groups(runs)
    colour_of = dict(zip(in_order(set(group_of.values())), COLOURS * 100, strict=False))
    if not group_of:
        return empty(_NO_ROUND)
    figure, panels = _panels(runs, 3.0, sharey=True)
    for label, run, axes in zip(labels(runs), runs, panels, strict=True):
        axes.set_title(label, fontsize=10)
        found: dict[str, dict[int, list[float]]] = {}
        for record in run.rounds:
            for entry in record.clients:
                if can_be_drawn(entry.counted_seconds):
                    rounds = found.setdefault(group_of[entry.client], {})
                    rounds.setdefault(record.round + 1, []).append(entry.counted_seconds)
        if not found:
            nothing(axes, _NO_ROUND)
            continue
        for group in in_order(found):
            dots = [(n, seconds) for n, each in found[group].items() for seconds in each]
            medians = [(n, statistics.median(each)) for n, each in found[group].items()]
            axes.plot(*zip(*dots, strict=True), ".", color=colour_of[group], alpha=0.35, markersize=4)
            axes.plot(*zip(*medians, strict=True), color=colour_of[group], label=group, linewidth=1.2)
        budgets = drawable((r.round + 1, r.clients[0].budget_seconds) for r in run.rounds if r.clients)
        if budgets:
            axes.plot(*zip(*budgets, strict=True), color="black", linestyle="--", linewidth=1, label="T_th")
        rounds_axis(axes)
    for axes in panels[::PANELS_PER_ROW]:
        axes.set_ylabel(_wrapped(seconds_name(runs)))
    panels[0].set_ylim(bottom=0)  # after all are drawn, because they share the axis
    legend_beside(figure, max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[0])))
    return figure


def _panels(runs: Sequence[StoredRun], height: float, **axes: Any) -> tuple[Figure, list[Any]]:
    """A figure with one part for each run."""
    num_rows, columns = -(-len(runs) // PANELS_PER_ROW), min(PANELS_PER_ROW, len(runs))
    figure, grid = figure_with(WIDTH, height * num_rows, nrows=num_rows, ncols=columns, squeeze=False, **axes)
    for unused in grid.flat[len(runs) :]:
        unused.set_visible(False)
    return figure, list(grid.flat[: len(runs)])


def seconds_by_phase(runs: Sequence[StoredRun]) -> Figure:
    """Stacked bars: of each client, or of each device type, in the mean of the last rounds."""
    shown = [_bars(run) for run in runs]
    most = min(NUM_BARS, max((len(clients) for clients in shown), default=0))
    if not most:
        return empty(_NO_ROUND)
    figure, panels = _panels(runs, 1.6 + 0.28 * most)
    longest = max((sum(spent.values()) for clients in shown for spent in clients.values()), default=0.0)
    for label, run, clients, axes in zip(labels(runs), runs, shown, panels, strict=True):
        axes.set_title(label, fontsize=10)
        if not clients or not can_be_drawn(longest):
            nothing(axes, _NO_ROUND)
            continue
        names = in_order(clients)[:NUM_BARS][::-1]
        left = [0.0] * len(names)
        for phase, colour in PHASE_COLOURS.items():
            seconds = [clients[name].get(phase, 0.0) for name in names]
            if any(seconds):
                axes.barh(names, seconds, left=left, color=colour, label=phase, height=0.7)
                left = [begin + width for begin, width in zip(left, seconds, strict=True)]
        budgets = [e.budget_seconds for r in run.rounds[-NUM_ROUNDS_SHOWN:] for e in r.clients]
        if can_be_drawn(mean := sum(budgets) / len(budgets)):
            axes.axvline(mean, color="black", linestyle="--", linewidth=1, label="T_th")
        axes.set_xlabel(_wrapped(seconds_name([run])))
        axes.grid(visible=False, axis="y")
        if longest > 0:
            axes.set_xlim(0, 1.05 * longest)
    legend_beside(figure, max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[0])))
    return figure


def _bars(run: StoredRun) -> dict[str, dict[str, float]]:
    """The mean seconds of each phase: by client, or by device type where there are many clients."""
    clients = run.seconds_by_phase(NUM_ROUNDS_SHOWN)
    if len(clients) <= NUM_BARS:
        return clients
    found: dict[str, list[dict[str, float]]] = {}
    for client, device in run.device_types().items():
        if client in clients:
            found.setdefault(device or "other", []).append(clients[client])
    return {
        f"{device} ({plural(len(spent), 'client')})": {
            phase: statistics.fmean(each[phase] for each in spent) for phase in spent[0]
        }
        for device, spent in found.items()
    }


def deviation(runs: Sequence[StoredRun]) -> Figure:
    figure, axes = figure_with(height=1.4 + 0.45 * len(runs))
    found = {
        label: [100 * d for d in run.deviations() if can_be_drawn(d)]
        for label, run in zip(labels(runs), runs, strict=True)
    }
    shown = {label: values for label, values in found.items() if values}
    if not shown:
        return empty(_NO_ROUND)
    axes.boxplot(
        list(shown.values())[::-1],
        orientation="horizontal",
        tick_labels=list(shown)[::-1],
        widths=0.5,
        flierprops={"markersize": 2},
        medianprops={"color": COLOURS[1]},
    )
    axes.axvline(0, color="black", linestyle="--", linewidth=1)
    said = ", virtual" if any(clock(run) for run in runs) else ""
    axes.set_xlabel(f"time that counts, compared with T_th (%{said}), every client and round")
    return figure


def selection_map(runs: Sequence[StoredRun]) -> Figure:
    """Rounds against tensors for each client, or for one per device type, of the first run with windows."""
    run = next((r for r in runs if any(e.window for x in r.rounds for e in x.clients)), runs[0])
    shown = _clients_of_map(run)
    names = {name for r in run.rounds for e in r.clients for name in e.selected}
    order = [n for n in (run.result.tensors if run.result else ()) if n] or sorted(names)
    if not shown or not order:
        return empty(_NO_ROUND)
    num_rows = -(-len(shown) // MAPS_PER_ROW)
    columns = min(MAPS_PER_ROW, len(shown))
    figure, grid = figure_with(
        WIDTH, 0.5 + 2.3 * num_rows, nrows=num_rows, ncols=columns, sharex=True, sharey=True, squeeze=False
    )
    position = {name: i for i, name in enumerate(order)}
    numbers = {record.round: i for i, record in enumerate(run.rounds)}
    first, last = run.rounds[0].round + 1, run.rounds[0].round + len(run.rounds)
    for (client, title), axes in zip(shown.items(), grid.flat, strict=False):
        cells = [[0] * len(run.rounds) for _ in order]
        for number, entry in run.per_client(client):
            chosen = {position[name] for name in entry.selected if name in position}
            for i, row in enumerate(cells):
                row[numbers[number]] = 2 if i in chosen else 1
        axes.imshow(
            cells,
            cmap=ListedColormap(["#ffffff", "#dfe7e3", COLOURS[0]]),
            vmin=0,
            vmax=2,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            extent=(first - 0.5, last + 0.5, 0.5, len(order) + 0.5),
        )
        axes.set_title(title, fontsize=9)
        axes.grid(visible=False)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in list(grid.flat)[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel("round", fontsize=10)
    figure.supylabel(f"tensor, input to output ({labels(runs)[list(runs).index(run)]})", fontsize=9)
    return figure


def _clients_of_map(run: StoredRun) -> dict[str, str]:
    """Which clients have a map, and its title."""
    types, clients = run.device_types(), in_order(run.clients())
    if len(clients) <= FEW_CLIENTS:
        return {c: f"{c} ({types[c]})" if types[c] and types[c] != c else c for c in clients}
    num_rounds: dict[str, int] = {}
    for record in run.rounds:
        for entry in record.clients:
            num_rounds[entry.client] = num_rounds.get(entry.client, 0) + 1
    best: dict[str, str] = {}
    for client in clients:
        device = types[client]
        if device not in best or num_rounds[client] > num_rounds[best[device]]:
            best[device] = client
    kinds = in_order(best)[: 2 * MAPS_PER_ROW]
    return {best[kind]: f"{kind} ({best[kind]})" if kind else best[kind] for kind in kinds}


def _wrapped(name: str) -> str:
    """The name of an axis on two lines: what it counts below."""
    return name.replace(" (", "\n(")
