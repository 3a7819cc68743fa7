"""``fedel demo``: a real federation on this machine, FedEL beside FedAvg on the same unequal fleet."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedel.api.federation import watched
from fedel.cli.data import show_progress
from fedel.desk import user_code
from fedel.desk.local import Federation, LocalFleet, read_job
from fedel.desk.screen import PHASES
from fedel.errors import ConfigError, DataError, ServiceError
from fedel.job import RunConfig, Workload
from fedel.serialisation import to_json
from fedel.v1 import coordinator_pb2 as pb

JOB = Path(__file__).with_name("demo.toml")
FALLBACK = "digits"
"""Small images that come with a Python package, so that no download is needed."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "demo",
        description="Servers and four agents of slowness 1, 2, 3 and 4, as processes on this machine, train "
        "the same model twice: with FedEL, then for the same time with FedAvg. Nothing to configure. Ctrl-C "
        "stops everything.",
        epilog="example:\n  fedel demo\n  fedel demo --set rounds.num_rounds=8 --set strategy.beta=0.4\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--job", type=Path, default=JOB, help="use this job instead of the demo's own")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), help="directory of runs (default: runs)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True) if arguments.json else Console()
    own = user_code.folders(None if arguments.job == JOB else arguments.job)
    user_code.search(None if arguments.job == JOB else arguments.job)
    from fedel.report import runs

    job, fleet = read_job(arguments.job, arguments.set)
    job = replace(job, workload=_workload(job.workload, console))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if job.strategy["name"] == "fedavg":
        raise ConfigError("the demo compares a strategy with FedAvg: choose a strategy other than fedavg")
    names = [f"demo-{stamp}-{job.strategy['name']}", f"demo-{stamp}-fedavg"]
    first = arguments.out / names[0]
    slowdowns = ", ".join(f"{s:g}" for s in fleet.slowdowns)
    console.print(
        f"A coordinator, an aggregator and {len(fleet.slowdowns)} agents start on this machine; the agents "
        f"behave like devices {slowdowns} times slower than it. Logs: {first}/federation/logs.",
        soft_wrap=True,
        highlight=False,
    )
    code = user_code.packages(job)
    with Federation(first / "federation", arguments.out, fleet, own, code) as federation:
        console.print(f"Live page: {federation.page}", highlight=False, soft_wrap=True)
        _train(federation, names[0], job, arguments.out, console, f"{job.rounds.num_rounds} rounds")
        seconds = runs.load(first).seconds()[-1]
        fedavg = replace(
            job,
            strategy={"name": "fedavg"},
            rounds=replace(job.rounds, max_seconds=seconds),
        )
        _train(federation, names[1], fedavg, arguments.out, console, f"the same time, {seconds:.1f} s")
    federation.forget_state()
    return _compare([arguments.out / name for name in names], job, fleet, console, arguments.json)


def _train(
    federation: Federation, name: str, job: RunConfig, out: Path, console: Console, how_long: str
) -> None:
    console.print(f"\n[bold]{job.strategy['name']}[/bold]: {how_long}", highlight=False)
    status = asyncio.run(watched(federation, name, job, out / name, console))
    if status.phase != pb.RUN_PHASE_FINISHED:
        raise ServiceError(f"run '{name}' {PHASES.get(status.phase, '?')}: {status.message}")


def _workload(wanted: Workload, console: Console) -> Workload:
    """The job's workload, its data downloaded if necessary; small images of a Python package if that fails."""
    from fedel.data import store
    from fedel.data.files import data_root

    name, root = wanted.data, data_root()
    if ":" in name or name == FALLBACK or store.is_present(name, root):
        return wanted
    try:
        console.print(f"downloading {name} into {root}, once", highlight=False, soft_wrap=True)
        with show_progress() as progress:
            store.get(name, root, progress)
        return wanted
    except DataError as error:
        console.print(
            f"{error}\n{name} cannot be downloaded: the demo uses the handwritten digits that come with "
            "scikit-learn instead (1,797 images of 8x8 pixels). Expect different accuracies.",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
        return replace(wanted, data=FALLBACK, data_options={})


def _compare(
    directories: list[Path], job: RunConfig, fleet: LocalFleet, console: Console, as_json: bool
) -> int:
    from fedel.report import page, runs
    from fedel.report.figures import figures, table
    from fedel.report.verdicts import verdicts

    found = [runs.load(path) for path in directories]
    written = page.write(found, directories[0], f"{found[0].method} beside {found[1].method}")
    sentences = verdicts(found)
    if as_json:
        print(to_json({"runs": list(map(figures, found)), "verdicts": sentences, "report": str(written)}))
        return 0
    console.print()
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=True)
    console.print()
    numbers = table(found)
    shown = Table(box=None, pad_edge=False)
    for head in numbers.heads:
        shown.add_column(head, justify="left" if head == "method" else "right")
    for row in numbers.rows:
        shown.add_row(*row)
    console.print(shown)
    console.print(
        f"Real training on {job.workload.data}, {len(fleet.slowdowns)} clients, seed {job.seed}, one run each: "
        "a demonstration, not a measurement of accuracy.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"report with pictures: {written}", highlight=False, soft_wrap=True)
    return 0
