"""The figures of the systems as tables, pictures and answers to the goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from fedel.bench.page import table
from fedel.bench.peers.venvs import FLOWER, NVFLARE
from fedel.bench.section import Goal, Row, Rows
from fedel.bench.workloads import workload

OURS, MTLS, SELECTED, TWO = "fedel", "fedel-mtls", "fedel-selected", "fedel-two"
FLOOR, STORING = "floor", "floor-storing"
PEERS = ("flower-grpc", "flower-superlink", "nvflare")
WORDS = {
    OURS: "FedEL",
    MTLS: "FedEL, mTLS",
    SELECTED: "FedEL, own selection",
    TWO: "FedEL, two aggregators",
    FLOOR: "floor: bare gRPC server",
    STORING: "the floor, storing updates",
    "flower-grpc": f"Flower {FLOWER.version}, gRPC server",
    "flower-superlink": f"Flower {FLOWER.version}, SuperLink",
    "nvflare": f"NVIDIA FLARE {NVFLARE.version}",
}
Cells = Mapping[tuple[str, int, str], Mapping[str, Any]]
"""By size, number of clients and system."""
ABOUT = """\
Nothing is trained; each client gets the whole model and sends a whole update, except with FedEL's own
selection. *Server* is, for FedEL, coordinator and aggregator; for Flower's gRPC server, its one process; for
SuperLink, that process and all that it starts; for FLARE, the process of its simulator without the workers that
are its clients. CPU seconds are user and system time of all of these processes, from the end of one round to
the end of the next, after a first round that is not counted. Peaks of memory are added up over processes. The
floor is a gRPC server that adds the same bytes up and does nothing else; once more with every update on disk
before it is answered, as FedEL does it. The loopback is that of the whole machine."""
TWICE = "Bytes per CPU second of the busiest process: two aggregators / one"
"""Seconds would not tell: on two cores, two aggregators compete with their clients."""
HEADS = (
    "system",
    "server CPU s per round",
    "least",
    "of the floor",
    "s per round",
    "server peak MB",
    "in models",
    "client peak MB",
    "loopback MB per round",
)


def together(rows: Rows) -> dict[tuple[str, int, str], Row]:
    """Mean over turns; peaks are the highest of all turns, the least is the least of all."""
    cells: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["size"], row["clients"], row["system"]), []).append(row)
    return {key: _mean(turns) for key, turns in cells.items()}


def _mean(turns: list[Mapping[str, Any]]) -> Row:
    good = [row for row in turns if "error" not in row]
    if not good:
        return {"error": turns[-1]["error"]}
    numbers = {key for row in good for key, value in row.items() if isinstance(value, int | float)}
    mean: Row = {key: statistics.fmean(row[key] for row in good if key in row) for key in numbers}
    mean["least_cpu_seconds"] = min(row["least_cpu_seconds"] for row in good)
    for key in ("server_peak_bytes", "client_peak_bytes"):
        mean[key] = max(row[key] for row in good)
    return mean


def show(rows: Rows) -> list[str]:
    cells, lines = together(rows), [ABOUT]
    for size, clients in dict.fromkeys((size, clients) for size, clients, _ in cells):
        model = workload(size).num_bytes
        lines += ["", f"### {size}, {model / 1e6:.0f} MB, {clients} clients", ""]
        here = {name: cells[size, clients, name] for name in WORDS if (size, clients, name) in cells}
        good = {name: row for name, row in here.items() if "error" not in row}
        lines += table(HEADS, [_line(name, row, good.get(FLOOR), model) for name, row in good.items()])
        lines += [""] if len(good) < len(here) else []
        lines += [f"* {WORDS[name]}: {row['error']}" for name, row in here.items() if "error" in row]
    return lines


def _line(name: str, row: Mapping[str, Any], floor: Mapping[str, Any] | None, model: int) -> list[str]:
    ratio = row["cpu_seconds"] / floor["cpu_seconds"] if floor and floor["cpu_seconds"] else None
    client = row["client_peak_bytes"]
    return [
        WORDS[name],
        f"{row['cpu_seconds']:.2f}",
        f"{row['least_cpu_seconds']:.2f}",
        f"{ratio:.2f}" if ratio else "",
        f"{row['seconds']:.1f}",
        f"{row['server_peak_bytes'] / 1e6:.0f}",
        f"{row['server_peak_bytes'] / model:.1f}",
        f"{client / 1e6:.0f}" if client else "",
        f"{row['loopback_bytes'] / 1e6:.0f}",
    ]


def goals(rows: Rows) -> list[Goal]:
    cells = together(rows)
    found = []
    for peer in PEERS:
        name = WORDS[peer]
        for key, what in (("cpu_seconds", "CPU seconds"), ("server_peak_bytes", "memory")):
            found.append(_times(cells, f"Server {what}, M, 10 clients: {name} / FedEL", peer, OURS, key, 6.0))
    for ours, limit in ((OURS, 1.4), (MTLS, 2.2), (SELECTED, None)):
        ratio = _ratio(cells, ("M", 10, ours), ("M", 10, FLOOR), "cpu_seconds")
        found.append(_at_most(f"Server CPU seconds, M, 10 clients: {WORDS[ours]} / floor", ratio, limit))
    ratio = _ratio(cells, ("M", 10, OURS), ("M", 10, STORING), "cpu_seconds")
    found.append(_at_most(f"Server CPU seconds, M, 10 clients: {WORDS[OURS]} / floor, storing", ratio, None))
    for size in ("M", "S"):
        ratio = _ratio(cells, (size, 200, OURS), (size, 10, OURS), "server_peak_bytes")
        found.append(_at_most(f"Server memory, {size}: 200 clients / 10 clients", ratio, 1.1))
    two = _ratio(cells, ("M", 10, OURS), ("M", 10, TWO), "busiest_cpu_seconds")
    if two is not None:
        found.append(Goal(f"{TWICE}, M, 10 clients", "at least 1.7", f"{two:.2f}", two >= 1.7))
    large = cells.get(("L", 10, OURS))
    if large and "error" not in large:
        models = large["server_peak_bytes"] / workload("L").num_bytes
        found.append(Goal("Server memory, L, 10 clients", "", f"{models:.1f} models"))
    for clients in (10, 200):
        row = cells.get(("M", clients, OURS), {})
        share = row["close_seconds"] / row["seconds"] if row.get("close_seconds") else None
        found.append(_at_most(f"Seconds of the commit / of the round, M, {clients} clients", share, 0.1))
    return [goal for goal in found if goal is not None]


def _ratio(cells: Cells, one: tuple[str, int, str], other: tuple[str, int, str], key: str) -> float | None:
    a, b = cells.get(one, {}).get(key), cells.get(other, {}).get(key)
    return a / b if a and b else None


def _times(cells: Cells, question: str, one: str, other: str, key: str, least: float) -> Goal | None:
    row = cells.get(("M", 10, one), {})
    if "error" in row:
        return Goal(question, f"at least {least:g}", "no figure, see below")
    ratio = _ratio(cells, ("M", 10, one), ("M", 10, other), key)
    return None if ratio is None else Goal(question, f"at least {least:g}", f"{ratio:.1f}", ratio >= least)


def _at_most(question: str, ratio: float | None, limit: float | None) -> Goal | None:
    if ratio is None:
        return None
    met = None if limit is None else ratio <= limit
    return Goal(question, "" if limit is None else f"at most {limit:g}", f"{ratio:.2f}", met)


def ratios(rows: Rows) -> dict[str, float]:
    """FedEL's CPU over the floor's, and its memory over the model's size."""
    cells, found = together(rows), {}
    for (size, clients, name), row in cells.items():
        if name in (FLOOR, STORING, *PEERS) or "error" in row:
            continue
        where = f"{WORDS[name]}, {size}, {clients} clients"
        ratio = _ratio(cells, (size, clients, name), (size, clients, FLOOR), "least_cpu_seconds")
        if ratio is not None:
            found[f"{where}: CPU / floor"] = ratio
        found[f"{where}: memory / model"] = row["server_peak_bytes"] / workload(size).num_bytes
    return found


def pictures(rows: Rows) -> dict[str, str]:
    """CPU seconds and peak memory of the server over the number of clients, for each size."""
    cells = {key: row for key, row in together(rows).items() if "error" not in row}
    return {size: _picture(cells, size) for size in dict.fromkeys(size for size, _, _ in cells)}


def _picture(cells: Cells, size: str) -> str:
    from matplotlib.ticker import LogLocator

    from fedel.experiments.pictures import COLOURS, draw

    def picture(grid: Any) -> None:
        colours = dict(zip((name for name in WORDS if name != STORING), COLOURS, strict=True))
        colours[STORING] = colours[FLOOR]
        for name, word in WORDS.items():
            points = sorted((key[1], row) for key, row in cells.items() if (key[0], key[2]) == (size, name))
            for axes, (key, unit, _) in zip(grid, PANELS, strict=True) if points else ():
                axes.plot(
                    [clients for clients, _ in points],
                    [row[key] / unit for _, row in points],
                    color=colours[name],
                    marker="o",
                    label=word,
                    linestyle=LINES.get(name, "-"),
                )
        counts = sorted({clients for at, clients, _ in cells if at == size})
        for axes, (_, _, label) in zip(grid, PANELS, strict=True):
            axes.set(xscale="log", yscale="log", xlabel="clients", ylabel=label)
            axes.set_xticks(counts, map(str, counts), minor=False)
            axes.set_xticks([], minor=True)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        handles, labels = grid[0].get_legend_handles_labels()
        grid[0].figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)

    return draw(picture, width=9.6, height=4.4, ncols=2)


LINES = {FLOOR: ":", STORING: "--"}
PANELS = (
    ("cpu_seconds", 1.0, "server CPU seconds per round"),
    ("server_peak_bytes", 1e9, "server peak memory (GB)"),
)
