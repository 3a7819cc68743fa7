"""``fedel simulate``: a fleet of a hundred unequal devices on a virtual clock, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fedel.cli import job_options
from fedel.errors import ConfigError
from fedel.records import RunResult
from fedel.report.verdicts import verdicts
from fedel.report.words import SCOPES, duration, plural
from fedel.serialisation import to_json

EXAMPLE = """example:
  fedel simulate configs/simulation.toml
  fedel simulate configs/simulation.toml --set work.lr=0.05 --workers 8
  fedel simulate configs/simulation.toml --resume        # continue after Ctrl-C
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "simulate",
        description="Train for real, and count the time that a fleet of unequal devices would take. The same "
        "seed gives the same model for any number of workers. Every round is saved before the next one begins.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("job", type=Path, help="TOML file with [strategy], [workload], [rounds], ...: docs/job.md")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    job_options.add(parser)
    add("--workers", type=int, default=0, metavar="N", help="processes that train (default: one per core)")
    add("--executor", choices=("serial", "processes", "ray"), default="processes", help="default: processes")
    add("--name", default="", help="name of the run (default: job, strategy and seed)")
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help="directory of runs (default: runs)")
    add("--resume", action="store_true", help="continue a run that was stopped")
    add("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    from fedel.api.simulation import simulate  # torch takes seconds to import

    console = Console(stderr=True)
    try:
        found = simulate(
            arguments.job,
            overrides=job_options.settings(arguments),
            name=arguments.name,
            out=arguments.out,
            workers=arguments.workers,
            executor=arguments.executor,
            resume=arguments.resume,
            mlflow=arguments.mlflow,
            progress=console,
        )
    except KeyboardInterrupt:
        command = f"fedel simulate {arguments.job} --resume"
        console.print(
            f"\nstopped; continue with `{command}` and the same options", highlight=False, soft_wrap=True
        )
        return 130
    try:
        report = f"report: {found.report()}"
    except ConfigError as error:
        report = f"{found.path}: no report, because {error}"
    if arguments.json:
        print(to_json(found.result))
        return 0
    for line in (_summary(found.result), *verdicts([found.stored])[1:], report):
        print(line)
    return 0


def _summary(result: RunResult) -> str:
    accuracy = result.accuracy
    said = "no test data, so no accuracy" if accuracy is None else f"accuracy {100 * accuracy:.2f} %"
    if result.best_accuracy is not None and result.best_round is not None:
        said += f" (best {100 * result.best_accuracy:.2f} % in round {result.best_round + 1})"
        said += f" of an average over versions ({result.average:g})" if result.average else ""
    counts = SCOPES.get(result.scope, result.scope)
    return (
        f"{result.strategy}: {said} after {plural(result.rounds, 'round')}. The fleet would have taken "
        f"{duration(result.virtual_seconds or 0.0)} ({counts}); simulating it took "
        f"{duration(result.wall_seconds)}. "
        f"{result.bytes_up / 1e6:.1f} MB up, {result.bytes_down / 1e6:.1f} MB down"
        + ("." if result.epsilon is None else f"; epsilon {result.epsilon:.2f}.")
    )
