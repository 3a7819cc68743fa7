"""FedEL beside other systems: the same model, the same number of clients, full updates, no training.

All systems take their turns in one run, for each size and number of clients, so that they see the same machine.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedel.bench import bare, machine, ours, shown
from fedel.bench.load import Load, Outcome
from fedel.bench.peers import run as peers
from fedel.bench.peers.venvs import FLOWER, NVFLARE, Package
from fedel.bench.section import Options, Row, Say, Section
from fedel.bench.shown import FLOOR, MTLS, OURS, SELECTED, STORING, TWO
from fedel.bench.workloads import Workload, workload
from fedel.errors import ConfigError, FedelError

SYSTEMS: Mapping[str, Callable[[Load, Path], Outcome]] = {
    OURS: ours.measure,
    MTLS: partial(ours.measure, mtls=True),
    SELECTED: partial(ours.measure, method="fedel"),
    TWO: partial(ours.measure, aggregators=2),
    FLOOR: bare.measure,
    STORING: partial(bare.measure, stores=True),
    "flower-grpc": peers.run_flower_grpc,
    "flower-superlink": peers.run_flower_superlink,
    "nvflare": peers.run_nvflare,
}
PACKAGES: Mapping[str, Package] = {"flower-grpc": FLOWER, "flower-superlink": FLOWER, "nvflare": NVFLARE}
OUR_OWN = (OURS, MTLS, SELECTED, FLOOR)
QUICK_SIZES, QUICK_CLIENTS = ("M",), (4,)
MODELS_NEEDED = {"flower-grpc": 12, "flower-superlink": 16, "nvflare": 12}
"""Memory that a client of a peer takes in server and clients together, in models: what surely does not fit is
not tried. A rough guess from runs with 10 clients."""


def measure(options: Options, say: Say) -> Iterator[Row]:
    names = _names(options)
    broken = _install(names, say)
    for load in _loads(options):
        for turn in range(1 if options.quick else options.turns):
            for name in names:
                row = {"system": name, "size": load.workload.name, "clients": load.num_clients, "turn": turn}
                row["what"] = f"{name} {load.workload.name} {load.num_clients} turn {turn}"
                if row["what"] in options.done:
                    continue
                error = broken.get(name) or _objection(name, load)
                row |= {"error": error} if error else one(name, load, options.folder)
                say(f"  {row['what']}: {_said(row)}")
                yield row


def _names(options: Options) -> list[str]:
    names = options.systems or (OUR_OWN if options.quick else tuple(SYSTEMS))
    if unknown := set(names) - SYSTEMS.keys():
        raise ConfigError(f"no system is named '{min(unknown)}'; there are: {', '.join(SYSTEMS)}")
    return list(names)


def _loads(options: Options) -> Iterator[Load]:
    sizes = QUICK_SIZES if options.quick else options.sizes
    for size in map(workload, sizes):
        for num_clients in QUICK_CLIENTS if options.quick else options.clients:
            yield Load(size, num_clients, _rounds(size, num_clients), options.seconds)


def _rounds(size: Workload, num_clients: int) -> int:
    """Fewer of the long ones; the first only warms up."""
    return 2 if size.num_bytes * num_clients > 5e9 else min(3, size.rounds) if num_clients > 10 else size.rounds


def _install(names: list[str], say: Say) -> dict[str, str]:
    """Why a system cannot be measured, of those that cannot."""
    broken = {}
    for name in names:
        if name in PACKAGES:
            try:
                PACKAGES[name].install(say)
            except FedelError as error:
                broken[name] = str(error)
    return broken


def _objection(name: str, load: Load) -> str:
    needed = MODELS_NEEDED.get(name, 0) * load.num_clients * load.workload.num_bytes
    needed += 60_000_000 * load.num_clients if name in PACKAGES else 0
    there = machine.available_bytes()
    if needed < there:
        return ""
    return f"not tried: it would need about {needed / 1e9:.0f} GB of memory, {there / 1e9:.0f} GB are free"


def one(name: str, load: Load, folder: Path) -> Row:
    """The figures of one measurement of one system, or why there are none."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}-") as place:
        try:
            outcome = SYSTEMS[name](load, Path(place))
        except FedelError as error:
            return {"error": " ".join(str(error).split())[:400]}
    return figures(outcome)


def figures(outcome: Outcome) -> Row:
    marks = outcome.watch.marks
    pairs = list(itertools.pairwise(marks))
    cpu = [after.cpu_seconds - before.cpu_seconds for before, after in pairs]
    row: Row = {
        "rounds": len(pairs),
        "cpu_seconds": statistics.fmean(cpu),
        "least_cpu_seconds": min(cpu),
        "busiest_cpu_seconds": statistics.fmean(
            max((end - start for start, end in zip(before.each, after.each, strict=True)), default=0.0)
            for before, after in pairs
        ),
        "seconds": statistics.fmean(after.seconds - before.seconds for before, after in pairs),
        "loopback_bytes": statistics.fmean(
            after.loopback_bytes - before.loopback_bytes for before, after in pairs
        ),
        "server_peak_bytes": outcome.watch.server_peak,
        "client_peak_bytes": outcome.watch.client_peak,
    }
    counted = {
        "bytes_up": outcome.bytes_up,
        "bytes_down": outcome.bytes_down,
        "close_seconds": outcome.close_seconds,
    }
    return row | {key: value for key, value in counted.items() if value is not None}


def _said(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    return f"{row['cpu_seconds']:.2f} CPU s, {row['seconds']:.1f} s, {row['server_peak_bytes'] / 1e6:.0f} MB"


SECTION = Section(
    "systems",
    "Beside other systems",
    20,
    measure,
    shown.show,
    shown.pictures,
    shown.goals,
    shown.ratios,
    quick=True,
)
