"""``fedel experiment``: the paper's tables and figures; missing runs are done first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedel.api.progress import RunLines
from fedel.desk import user_code

if TYPE_CHECKING:
    from fedel.experiments.pages import Report
    from fedel.experiments.plans import PlannedRun

NAMES = (
    "headline",
    "ablation",
    "table1",
    "deviation",
    "composition",
    "rollback",
    "beta",
    "budget",
    "window",
    "resources",
    "statistics",
    "selection",
    "importance",
    "devices",
)
EXAMPLE = """example:
  fedel experiment headline --scale small
  fedel experiment table1 --scale small --tasks cifar10
  fedel experiment all --scale small --list             # which runs it needs
  fedel experiment all --scale small --only-report      # from the runs done so far
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "experiment",
        description="Do the runs that a table or figure needs; report.html and results.md show the "
        "paper's numbers beside ours. Finished runs are used again; Ctrl-C loses at most one round.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", choices=("all", *NAMES), metavar="NAME", help=f"all, {', '.join(NAMES)}")
    add("--scale", default="small", help="ci (seconds), small (hours on two cores), paper, or a TOML file")
    add(
        "--tasks",
        type=words,
        default=(),
        metavar="A,B",
        help="some of the scale's tasks, such as cifar10, speech, text",
    )
    add(
        "--seeds",
        type=int,
        default=0,
        metavar="N",
        help="seeds per run (default: from the scale)",
    )
    add(
        "--out", type=Path, metavar="DIR", help="directory of runs and report (default: runs/experiments/SCALE)"
    )
    add("--workers", type=int, default=0, metavar="N", help="processes that train (default: one per core)")
    add("--executor", choices=("serial", "processes", "ray"), default="processes", help="default: processes")
    add("--list", action="store_true", help="list the runs and their progress, and do nothing")
    add("--only-report", action="store_true", help="do no runs, report on the finished ones")
    add(
        "--markdown",
        type=Path,
        metavar="FILE",
        help="also write the Markdown page here, its pictures in img/ beside it",
    )
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def words(text: str) -> tuple[str, ...]:
    """An option that takes several words, with commas between them."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def main(arguments: argparse.Namespace) -> int:
    user_code.search()
    from fedel.experiments import plans, report, runner, scale  # torch takes seconds to import

    size = scale.load(arguments.scale)
    out = arguments.out or Path("runs") / "experiments" / size.name
    names = NAMES if arguments.name == "all" else (arguments.name,)
    wanted = {name: plans.plan(name, size, arguments.tasks, arguments.seeds) for name in names}
    runs = plans.distinct(run for planned in wanted.values() for run in planned)
    if arguments.list:
        _list(runs, out / "runs", arguments.json)
        return 0
    failed: dict[str, str] = {}
    if not arguments.only_report:
        options = {"executor": arguments.executor, "num_workers": arguments.workers}
        with _screen() as screen:
            failed = runner.do_missing(runs, out / "runs", screen, **options)
    made = report.make(size, wanted, out / "runs", failed)
    written = report.write(made, out, arguments.markdown)
    if arguments.json:
        print(json.dumps(report.as_json(made)))
    else:
        _summary(made)
        print(f"{made.num_done} of {len(runs)} runs are done; report: {', '.join(map(str, written))}")
    return 1 if failed else 0


def _summary(made: Report) -> None:
    for section in made.sections:
        for verdict in section.verdicts:
            print(f"{verdict.answer}: {verdict.claim} ({verdict.numbers})")
    for section in made.sections:
        if section.missing:
            print(f"{section.name}: these runs are missing: {'; '.join(section.missing)}")


def _list(runs: list[PlannedRun], place: Path, as_json: bool) -> None:
    from fedel.experiments import runner

    rows = [
        {
            "run": run.name,
            "task": run.task,
            "label": run.label,
            "seed": run.seed,
            "state": runner.state(run, place),
            "rounds_done": runner.rounds_done(run, place),
            "rounds": run.num_rounds,
        }
        for run in runs
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"{row['state']:8}{row['rounds_done']:>4}/{row['rounds']:<4} {row['run']}  ({row['label']})")
    print(f"{sum(row['state'] == runner.DONE for row in rows)} of {len(rows)} runs are done")


@contextmanager
def _screen() -> Iterator[RunLines]:
    console = Console(stderr=True)
    try:
        yield RunLines(console)
    except KeyboardInterrupt:
        console.print("\nstopped; run the same command again to continue", highlight=False)
        raise
