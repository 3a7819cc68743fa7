"""``fedel run``: a job, on processes of this machine or on a federation that runs already."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fedel.cli import job_options
from fedel.cli.certs import add_certs
from fedel.report.verdicts import verdicts
from fedel.serialisation import to_json

EXAMPLE = """example:
  fedel run examples/own.toml
  fedel run examples/own.toml --set strategy.name=fedavg --set rounds.num_rounds=5
  fedel run examples/own.toml --coordinator server:7070     # on a federation that runs already
  fedel run examples/own.toml --name night --resume         # continue after Ctrl-C
  fedel run examples/own.toml --coordinator server:7070 --code examples/own.py     # with your own code
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "run",
        description="Run a job. Without --coordinator, servers and agents are started on this machine. "
        "Your own models and data are searched in the working directory, then in the folder of the job file.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "job", type=Path, help="TOML file with [strategy], [workload], [rounds], ...: docs/job.md"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )
    job_options.add(parser)
    parser.add_argument("--name", default="", help="name of the run (default: job, strategy and time)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="directory of runs (default: runs)")
    parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="use this federation")
    parser.add_argument(
        "--stop-on-exit",
        action="store_true",
        help="with --coordinator: Ctrl-C stops the run too",
    )
    add_certs(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run --name, which was stopped")
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="PATH",
        help="with --coordinator: file, folder or module of your own that is sent along: docs/job-code.md",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    from fedel.api.federation import run

    console = Console(stderr=True) if arguments.json else Console()
    found = run(
        arguments.job,
        overrides=job_options.settings(arguments),
        name=arguments.name,
        out=arguments.out,
        coordinator=arguments.coordinator,
        certs=arguments.certs,
        resume=arguments.resume,
        code=arguments.code,
        mlflow=arguments.mlflow,
        stop_on_exit=arguments.stop_on_exit,
        progress=console,
    )
    report = found.report()
    if arguments.json:
        print(to_json(found.result))
        return 0
    for line in (*verdicts([found.stored]), f"report: {report}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
