"""Does the missing runs, one at a time; reuses finished runs and continues those that were started."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fedel.errors import FedelError
from fedel.experiments.plans import PlannedRun
from fedel.records import RoundRecord, RunResult
from fedel.simulation import start
from fedel.simulation.job import SimulationConfig
from fedel.simulation.store import RunFolder, alone

DONE, BEGUN, MISSING = "done", "begun", "missing"


class Screen(Protocol):
    """Receives the progress."""

    def run_begins(self, run: PlannedRun, place: int, total: int) -> None: ...

    def round_done(self, run: PlannedRun, record: RoundRecord, seconds_left: float) -> None: ...

    def run_ended(self, run: PlannedRun, said: str) -> None: ...


@dataclass
class Pace:
    """Wall seconds per round and task, learnt from finished rounds; a guess for tasks without any."""

    seen: dict[str, tuple[float, int]] = field(default_factory=dict)

    def learn(self, task: str, seconds: float, rounds: int = 1) -> None:
        before = self.seen.get(task, (0.0, 0))
        self.seen[task] = before[0] + seconds, before[1] + rounds

    def seconds(self, task: str, rounds: int) -> float:
        """
        >>> pace = Pace(); pace.learn("a", 30, rounds=10); pace.seconds("a", 5), pace.seconds("b", 2)
        (15.0, 6.0)
        """
        known = [self.seen[task]] if task in self.seen else list(self.seen.values())
        total = sum(n for _, n in known)
        return rounds * sum(s for s, _ in known) / total if total else 0.0


def state(run: PlannedRun, out: Path) -> str:
    """``done``, ``begun`` or ``missing``; raises ConfigError if the run of another job has its name."""
    folder = out / run.name
    RunFolder(folder).check(run.table, resume=True)
    if (folder / "result.json").exists():
        return DONE
    return BEGUN if (folder / "rounds.jsonl").exists() else MISSING


def rounds_done(run: PlannedRun, out: Path) -> int:
    return len(RunFolder(out / run.name).records())


def do_missing(
    runs: Sequence[PlannedRun], out: Path, screen: Screen, *, executor: str = "processes", num_workers: int = 0
) -> dict[str, str]:
    """Do all runs that are not done; returns the errors of failed runs by name.

    Every round is on disk before the next one starts, so it can be interrupted at any time.
    """
    pace, failed, todo = Pace(), dict[str, str](), list[PlannedRun]()
    for run in runs:
        if state(run, out) == DONE:
            result = _stored(out / run.name)
            pace.learn(run.task, result.wall_seconds, result.rounds)
        else:
            todo.append(run)
    for place, run in enumerate(todo):
        screen.run_begins(run, place + 1, len(todo))
        begin = time.monotonic()
        try:
            with alone(out / run.name) as is_alone:
                if not is_alone:
                    screen.run_ended(run, "skipped, because another process is working on it")
                    continue
                result = _do(run, todo[place + 1 :], out, screen, pace, executor, num_workers)
        except FedelError as error:
            failed[run.name] = str(error)
            screen.run_ended(run, f"failed: {error}")
        else:
            screen.run_ended(run, _outcome_line(result, time.monotonic() - begin))
    return failed


def _do(
    run: PlannedRun,
    later: Sequence[PlannedRun],
    out: Path,
    screen: Screen,
    pace: Pace,
    executor: str,
    num_workers: int,
) -> RunResult:
    folder = out / run.name
    if state(run, out) == DONE:  # by another process in the meantime
        return _stored(folder)
    waiting = [(other.task, other.num_rounds - rounds_done(other, out)) for other in later]

    def round_done(record: RoundRecord) -> None:
        pace.learn(run.task, record.wall_seconds or 0.0)
        left = pace.seconds(run.task, run.num_rounds - record.round - 1)
        left += sum(pace.seconds(task, rounds) for task, rounds in waiting)
        screen.round_done(run, record, left)

    job = SimulationConfig.parse(run.table, run.name)
    with start.session(job, folder, resume=True, executor=executor, num_workers=num_workers) as session:
        return start.play_all(session, round_done)


def _stored(folder: Path) -> RunResult:
    file = folder / "result.json"
    return RunResult.from_json(file.read_text(encoding="utf-8"), str(file))


def _outcome_line(result: RunResult, seconds: float) -> str:
    accuracy = result.accuracy
    tested = "no test data" if accuracy is None else f"accuracy {100 * accuracy:.2f} %"
    return f"{tested} after {result.rounds} rounds; {seconds:.0f} s here"
