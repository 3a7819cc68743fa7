"""How a run is followed: lines or a bar on a terminal, lines in a pipe or a notebook, or a function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text

from fedel.records import RoundRecord
from fedel.report.refusals import NewReasons, count_said
from fedel.report.words import duration
from fedel.roles.gate import clean

if TYPE_CHECKING:
    from fedel.experiments.plans import PlannedRun

Progress = bool | Callable[[RoundRecord], object] | Console
"""``True`` shows every round, ``False`` nothing; a function gets the record of every round; a console of rich
shows the rounds there."""


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with what became of the run and how it goes on."""


def console_of(progress: Progress) -> Console:
    """Where to show rounds; a console that prints nothing if they are not to be shown."""
    if isinstance(progress, Console):
        return progress
    if progress is not True:
        return Console(quiet=True)
    # A notebook shows what is printed to stderr as if it were an error, and has no terminal for a bar.
    if Console().is_jupyter:
        return Console(file=sys.stdout, force_terminal=False, force_jupyter=False)
    return Console(stderr=True)


def heard(progress: Progress, record: RoundRecord) -> None:
    """Hand the record of a round to the caller's function, if it gave one."""
    if callable(progress):
        progress(record)


def say(console: Console, text: str, style: str = "") -> None:
    """One line, however long: a script reads it."""
    console.print(Text(text, style=style), soft_wrap=True)


@dataclass(frozen=True)
class Rounds:
    """What a screen wants to hear of a simulation."""

    round_done: Callable[[RoundRecord], None]
    client_done: Callable[[int, int], None] | None = None


@contextmanager
def screen(console: Console, first_round: int, num_rounds: int) -> Iterator[Rounds]:
    """One line per round; on a terminal, below them, a bar that moves with every client."""
    begin, new_reasons = time.monotonic(), NewReasons()

    def left(done: float) -> float:
        return (time.monotonic() - begin) / max(done - first_round, 1e-9) * (num_rounds - done)

    def show(record: RoundRecord) -> None:
        say(console, _line(record, num_rounds, left(record.round + 1)))
        for reason in new_reasons.of(record):
            say(console, clean(f"  {reason}"))

    if not console.is_terminal:
        yield Rounds(show)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Bars(*columns, console=console, transient=True) as bars:
        done_before = first_round
        bar = bars.add_task(f"round {first_round + 1}", total=num_rounds - first_round)

        def round_done(record: RoundRecord) -> None:
            nonlocal done_before
            done_before = record.round + 1
            show(record)
            bars.update(bar, completed=done_before - first_round)

        def client_done(done: int, total: int) -> None:
            doing = f"round {done_before + 1}: {done}/{total} clients"
            # Testing the model comes after the last client.
            share = 0.95 * done / total
            bars.update(bar, description=doing, completed=done_before - first_round + share)

        yield Rounds(round_done, client_done)


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


class RunLines:
    """For many runs, also side by side: a line when a run begins, after every test, and when it ends."""

    def __init__(self, progress: Progress) -> None:
        self._console, self._progress = console_of(progress), progress
        self._heads: dict[str, str] = {}
        self._new_reasons: dict[str, NewReasons] = {}

    def run_begins(self, run: PlannedRun, place: int, total: int) -> None:
        self._heads[run.name] = f"[{place}/{total}] {run.name}"
        self._new_reasons[run.name] = NewReasons()
        self._say(run, "begins")

    def round_done(self, run: PlannedRun, record: RoundRecord, seconds_left: float) -> None:
        heard(self._progress, record)
        if record.accuracy is not None:
            self._say(
                run,
                f"round {record.round + 1:>3}/{run.num_rounds}  accuracy {100 * record.accuracy:.2f} %"
                f"  {record.wall_seconds or 0.0:.1f} s here  {_minutes(seconds_left)} left for all",
            )
        for reason in self._new_reasons[run.name].of(record):
            self._say(run, clean(f"round {record.round + 1}: {reason}"))

    def run_ended(self, run: PlannedRun, said: str) -> None:
        self._say(run, said)

    def _say(self, run: PlannedRun, text: str) -> None:
        say(self._console, f"{self._heads[run.name]}  {text}")


def _minutes(seconds: float) -> str:
    """
    >>> _minutes(95), _minutes(8000)
    ('2 min', '2 h 13 min')
    """
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
