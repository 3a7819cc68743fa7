"""The pictures of a report, as SVG text. Each function draws one picture from the runs it is given."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from fedel.report.runs import StoredRun

COLOURS = ("#0b6e4f", "#c8553d", "#30638e", "#b58900", "#6c4675", "#5a7d7c", "#8c2f39", "#3d405b")
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
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedel",  # so that the same run gives the same file
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
}


def _figure(width: float = 7.2, height: float = 3.6, **axes: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**axes)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def draw(picture: Any, runs: Sequence[StoredRun]) -> str:
    """One of the functions below, as SVG text."""
    with matplotlib.rc_context(_STYLE):
        return _svg(picture(runs))


def accuracy_against_time(runs: Sequence[StoredRun]) -> Figure:
    figure, axes = _figure()
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        points = run.accuracies()
        axes.plot(
            [seconds for _, seconds, _ in points],
            [100 * accuracy for _, _, accuracy in points],
            color=colour,
            marker="o",
            markersize=3,
            label=run.strategy,
        )
    axes.set(xlabel="training time (seconds)", ylabel="test accuracy (%)", xlim=(0, None))
    axes.legend(frameon=False, loc="lower right")
    return figure


def round_time_by_client(runs: Sequence[StoredRun]) -> Figure:
    figure, grid = _figure(height=2.8, ncols=len(runs), sharey=True, squeeze=False)
    for run, axes in zip(runs, grid[0], strict=True):
        for client, colour in zip(run.clients(), COLOURS * 100, strict=False):
            entries = run.per_client(client)
            rounds = [number for number, _ in entries]
            axes.plot(
                rounds, [e.counted_seconds for _, e in entries], color=colour, label=client, linewidth=1.2
            )
        budgets = [(r.round, r.clients[0].budget_seconds) for r in run.rounds if r.clients]
        if budgets:
            axes.plot(*zip(*budgets, strict=True), color="black", linestyle="--", linewidth=1, label="T_th")
        axes.set(title=run.strategy, xlabel="round")
        axes.xaxis.get_major_locator().set_params(integer=True)
    grid[0][0].set_ylabel("seconds")
    grid[0][0].set_ylim(bottom=0)  # after all are drawn, because they share the axis
    if 0 < len(runs[0].clients()) <= 12:
        grid[0][-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def seconds_by_phase(runs: Sequence[StoredRun]) -> Figure:
    """Stacked bars: of each client, or of those that worked longest, in the mean of the last rounds."""
    shown = [run.seconds_by_phase(NUM_ROUNDS_SHOWN) for run in runs]
    most = min(NUM_BARS, max((len(clients) for clients in shown), default=0))
    figure, grid = _figure(height=1.6 + 0.28 * most, ncols=len(runs), sharex=True, squeeze=False)
    for run, clients, axes in zip(runs, shown, grid[0], strict=True):
        longest = sorted(clients, key=lambda client: clients[client]["idle"])[:NUM_BARS]
        names = sorted(longest, reverse=True)
        left = [0.0] * len(names)
        for phase, colour in PHASE_COLOURS.items():
            seconds = [clients[name].get(phase, 0.0) for name in names]
            axes.barh(names, seconds, left=left, color=colour, label=phase, height=0.7)
            left = [begin + width for begin, width in zip(left, seconds, strict=True)]
        budgets = [e.budget_seconds for r in run.rounds[-NUM_ROUNDS_SHOWN:] for e in r.clients]
        if budgets:
            mean = sum(budgets) / len(budgets)
            axes.axvline(mean, color="black", linestyle="--", linewidth=1, label="T_th")
        axes.set(title=run.strategy, xlabel="seconds")
        axes.grid(visible=False, axis="y")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")
    return figure


def deviation(runs: Sequence[StoredRun]) -> Figure:
    figure, axes = _figure(height=2.8)
    shown = [run for run in runs if run.deviations()]
    if shown:
        axes.boxplot(
            [[100 * d for d in run.deviations()] for run in shown],
            orientation="horizontal",
            tick_labels=[run.strategy for run in shown],
            widths=0.5,
            flierprops={"markersize": 2},
            medianprops={"color": COLOURS[1]},
        )
    axes.axvline(0, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="training time compared with T_th (%), every client and round")
    return figure


def selection_map(runs: Sequence[StoredRun]) -> Figure:
    """Rounds against tensors for one client per device type, for the first run that selects tensors."""
    run = next((r for r in runs if any(e.window for x in r.rounds for e in x.clients)), runs[0])
    types = {e.client: e.device_type or e.client for r in run.rounds for e in r.clients}
    shown = {types[client]: client for client in reversed(run.clients())}
    clients = sorted(shown.values())[:8]
    names = list(dict.fromkeys(n for r in run.rounds for e in r.clients for n in e.selected))
    order = (run.result.tensors if run.result else ()) or sorted(names)
    position = {name: i for i, name in enumerate(order)}
    figure, grid = _figure(height=3.2, ncols=max(1, len(clients)), sharey=True, squeeze=False)
    for client, axes in zip(clients, grid[0], strict=False):
        dots = [(n, position[t]) for n, e in run.per_client(client) for t in e.selected if t in position]
        if dots:
            axes.scatter(*zip(*dots, strict=True), s=5, marker="s", color=COLOURS[0], linewidths=0)
        axes.set(title=types[client], xlabel="round", ylim=(-1, len(order)), xlim=(-0.5, len(run.rounds) - 0.5))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.title.set_fontsize(9)
    grid[0][0].set_ylabel(f"tensor, input to output\n({run.strategy})")
    return figure


def bytes_by_round(runs: Sequence[StoredRun]) -> Figure:
    figure, axes = _figure(height=2.8)
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        up, down = [r.bytes_up for r in run.rounds], [r.bytes_down for r in run.rounds]
        for way, style, num_bytes in (("up", "-", up), ("down", ":", down)):
            axes.plot(
                [r.round for r in run.rounds],
                [n / 1e6 for n in num_bytes],
                color=colour,
                linestyle=style,
                label=f"{run.strategy}, {way}",
            )
    axes.set(xlabel="round", ylabel="megabytes, all clients", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
