"""Runs of a comparison side by side, each in a process of its own; this process tells how far they are."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedel.errors import ConfigError
from fedel.experiments import runner
from fedel.experiments.plans import PlannedRun
from fedel.records import RoundRecord
from fedel.simulation.children import Failure, fork
from fedel.simulation.executors import cores

END_SECONDS = 10.0
"""A process that was told to end may finish a step that takes this long."""


def do_missing(
    runs: Sequence[PlannedRun],
    out: Path,
    screen: runner.Screen,
    *,
    num_jobs: int = 0,
    executor: str = "processes",
    num_workers: int = 0,
) -> dict[str, str]:
    """Do all runs that are not done, ``num_jobs`` at a time; 0 takes one per core.

    Returns the errors of failed runs by name. Every round is on disk before the next one starts, so it can be
    interrupted at any time, and gives the same as one run at a time.
    """
    if num_jobs < 0:
        raise ConfigError(f"--jobs {num_jobs}: at least one run at a time; 0 takes one per core")
    if num_jobs > 1 and executor != "processes":
        raise ConfigError(f"--jobs {num_jobs} needs --executor processes; {executor} does one run at a time")
    todo = [run for run in runs if runner.state(run, out) != runner.DONE]
    num_jobs = min(num_jobs or cores(), len(todo)) if executor == "processes" else 1
    if num_jobs < 2:
        return runner.do_missing(runs, out, screen, executor=executor, num_workers=num_workers)
    num_workers = num_workers or max(1, cores() // num_jobs)
    options = {"executor": "processes" if num_workers > 1 else "serial", "num_workers": num_workers}
    return _SideBySide(todo, out, screen, options).play(num_jobs)


@dataclass(frozen=True)
class _AtWork:
    run: PlannedRun
    process: BaseProcess

    def end(self) -> None:
        self.process.terminate()
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _SideBySide:
    def __init__(
        self, todo: Sequence[PlannedRun], out: Path, screen: runner.Screen, options: dict[str, Any]
    ) -> None:
        self._out, self._screen, self._options = out, screen, options
        self._waiting, self._total = deque(todo), len(todo)
        self._at_work: dict[Connection, _AtWork] = {}
        self._failed: dict[str, str] = {}
        self._pace = runner.Pace()
        self._left = {run.name: run.num_rounds - runner.rounds_done(run, out) for run in todo}
        """Rounds that each run still has to do."""
        self._tasks = {run.name: run.task for run in todo}
        # A profile is measured by the first run, while nothing else keeps the machine busy; others then use it.
        self._measures = any(run.table["fleet"]["base"] in ("measured", "auto") for run in todo)

    def play(self, num_jobs: int) -> dict[str, str]:
        try:
            while self._waiting or self._at_work:
                while self._waiting and len(self._at_work) < (1 if self._measures else num_jobs):
                    self._begin(self._waiting.popleft())
                for connection in wait(list(self._at_work)):
                    assert isinstance(connection, Connection)
                    self._hear(connection)
        finally:
            for each in self._at_work.values():
                each.end()
        return self._failed

    def _begin(self, run: PlannedRun) -> None:
        self._screen.run_begins(run, self._total - len(self._waiting), self._total)
        ours, theirs = multiprocessing.Pipe(duplex=False)
        # A process that kept our ends would not see that this one is gone.
        words = theirs, (*self._at_work, ours), run, self._out, self._options
        self._at_work[ours] = _AtWork(run, fork(_do, words, f"fedel-{run.name}", daemon=False))
        theirs.close()

    def _hear(self, connection: Connection) -> None:
        run, process = self._at_work[connection].run, self._at_work[connection].process
        try:
            heard = connection.recv()
        except (EOFError, ConnectionResetError):
            del self._at_work[connection]
            connection.close()
            process.join()
            self._measures = False
            self._left.pop(run.name)
            if process.exitcode:
                self._fail(
                    run,
                    f"its process ended by itself (exit code {process.exitcode}); with code -9 the machine was"
                    " out of memory: use fewer --jobs",
                )
            return
        if isinstance(heard, RoundRecord):
            self._measures = False
            self._left[run.name] = run.num_rounds - heard.round - 1
            self._pace.learn(run.task, heard.wall_seconds or 0.0)
            seconds = sum(self._pace.seconds(self._tasks[name], left) for name, left in self._left.items())
            self._screen.round_done(run, heard, seconds / len(self._at_work))
        elif isinstance(heard, Failure):
            self._fail(run, str(heard.error()))
        elif isinstance(heard, dict):
            self._failed |= heard
        else:
            self._screen.run_ended(run, heard)

    def _fail(self, run: PlannedRun, why: str) -> None:
        self._failed[run.name] = why
        self._screen.run_ended(run, f"failed: {why}")


class _Teller:
    """The screen of a run in its own process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run_begins(self, run: PlannedRun, place: int, total: int) -> None:
        pass

    def round_done(self, run: PlannedRun, record: RoundRecord, seconds_left: float) -> None:  # noqa: ARG002
        self._connection.send(record)

    def run_ended(self, run: PlannedRun, said: str) -> None:  # noqa: ARG002
        self._connection.send(said)


def _do(
    connection: Connection, unwanted: Sequence[Connection], run: PlannedRun, out: Path, options: dict[str, Any]
) -> None:
    # Ctrl-C reaches the whole group of processes; the first one ends the others, and they end their workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for other in unwanted:
        other.close()
    try:
        import torch

        torch.set_num_threads(1)  # more of them cannot be used after a fork
        connection.send(runner.do_missing([run], out, _Teller(connection), **options))
    except BrokenPipeError:  # the process that asked for it is gone; what is done is on disk
        return
    except Exception as error:
        connection.send(Failure.of(error))
