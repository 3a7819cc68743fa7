"""``fedel simulate``: a fleet of a hundred unequal devices on a virtual clock, on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fedel import config
from fedel.cli import job_options, user_code
from fedel.cli.screen import more_than_there_are
from fedel.records import RoundRecord, RunResult
from fedel.report import runs
from fedel.report.refusals import NewReasons, count_said
from fedel.report.verdicts import verdicts
from fedel.report.words import SCOPES, duration, plural
from fedel.roles.gate import clean
from fedel.serialisation import to_json
from fedel.strategies import find
from fedel.tracking import tracked

EXAMPLE = """example:
  fedel simulate configs/simulation.toml
  fedel simulate configs/simulation.toml --set strategy.name=fedavg --workers 8
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
    user_code.search(arguments.job)
    from fedel.simulation import start  # torch takes seconds to import
    from fedel.simulation.job import SimulationConfig

    job = SimulationConfig.parse(
        config.read(arguments.job, job_options.settings(arguments)), str(arguments.job)
    )
    name = arguments.name or f"{arguments.job.stem}-{_label(dict(job.run.strategy))}-{job.run.seed}"
    path, console = arguments.out / name, Console(stderr=True)
    if too_many := more_than_there_are(job.run.rounds.num_participants, job.partition.num_clients):
        console.print(too_many, style="yellow", highlight=False, soft_wrap=True)
    try:
        with (
            tracked(arguments.mlflow, path, job.table()) as track,
            start.session(
                job,
                path,
                resume=arguments.resume,
                executor=arguments.executor,
                num_workers=arguments.workers,
            ) as session,
            _screen(console, session.num_played, job.run.rounds.num_rounds) as screen,
        ):

            def round_done(record: RoundRecord) -> None:
                screen.round_done(record)
                track(record)

            result = start.play_all(session, round_done, screen.client_done)
            report = _report(path)
    except KeyboardInterrupt:
        command = f"fedel simulate {arguments.job} --resume"
        console.print(
            f"\nstopped; continue with `{command}` and the same options", highlight=False, soft_wrap=True
        )
        return 130
    if arguments.json:
        print(to_json(result))
        return 0
    print(_summary(result))
    for sentence in verdicts([runs.load(path)])[1:]:
        print(sentence)
    print(
        f"report: {report}" if report else f"{path}: no report without matplotlib (pip install 'fedel[plots]')"
    )
    return 0


def _label(strategy: dict[str, Any]) -> str:
    name: str = find(str(strategy.get("name", ""))).name
    return f"{name}-{_label(strategy['base'])}" if isinstance(strategy.get("base"), dict) else name


def _report(path: Path) -> Path | None:
    try:
        from fedel.report import page
    except ImportError:
        return None
    return page.write([runs.load(path)], path)


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


def _line(record: RoundRecord, num_rounds: int, left: float) -> str:
    accuracy, loss = record.accuracy, record.loss
    return (
        f"round {record.round + 1:>3}/{num_rounds}"
        f"  {duration(record.latency_seconds)} virtual, {duration(record.wall_seconds or 0.0)} here"
        f"  {count_said(record)}"
        f"  loss {'-' if loss is None else f'{loss:.3f}'}"
        f"  accuracy {'-' if accuracy is None else f'{100 * accuracy:.2f} %'}"
        + (f"  {duration(left)} left" if record.round + 1 < num_rounds else "")
    )


@contextmanager
def _screen(console: Console, first_round: int, num_rounds: int) -> Iterator[SimpleNamespace]:
    """One line per round; on a terminal, below them, a bar that moves with every client."""
    begin, new_reasons = time.monotonic(), NewReasons()

    def left(done: float) -> float:
        return (time.monotonic() - begin) / max(done - first_round, 1e-9) * (num_rounds - done)

    def say(record: RoundRecord, show: Callable[[str], object]) -> None:
        show(_line(record, num_rounds, left(record.round + 1)))
        for reason in new_reasons.of(record):
            show(clean(f"  {reason}"))

    if not console.is_terminal:
        yield SimpleNamespace(
            round_done=lambda record: say(record, lambda line: print(line, file=sys.stderr, flush=True)),
            client_done=None,
        )
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bars:
        state = SimpleNamespace(rounds=first_round)
        bar = bars.add_task(f"round {first_round + 1}", total=num_rounds - first_round)

        def round_done(record: RoundRecord) -> None:
            state.rounds = record.round + 1
            say(record, lambda line: bars.console.print(Text(line), soft_wrap=True))
            bars.update(bar, completed=state.rounds - first_round)

        def client_done(done: int, total: int) -> None:
            doing = f"round {state.rounds + 1}: {done}/{total} clients"
            # Testing the model comes after the last client.
            share = 0.95 * done / total
            bars.update(bar, description=doing, completed=state.rounds - first_round + share)

        yield SimpleNamespace(round_done=round_done, client_done=client_done)
