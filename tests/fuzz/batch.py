"""Run cases of one target in a process of its own, under limits of time and memory.

The parent gives a target, a seed and a range of case numbers, and reads lines of JSON: findings, then a
summary. Which case is running stands in a small shared file, so that the parent knows it if the process dies.
"""

from __future__ import annotations

import argparse
import json
import logging
import mmap
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedel.errors import FedelError
from tests.fuzz.target import Read, Target

MEGABYTE = 1024 * 1024
KEPT_PER_PLACE = 2
"""Cases that are kept of those that fail in the same way at the same line."""
_SMALLER_SECONDS = 1.0
"""CPU time spent on making a failing case smaller."""


class TooSlow(BaseException):
    """Raised by the timer in the middle of a case; no reader catches it by accident."""


@dataclass(frozen=True)
class Finding:
    target: str
    number: int
    """Of the case; -1 for one of the corpus, or where it is not known which one it was."""
    error: str
    place: str
    data: str
    """The input as hexadecimal digits."""


@dataclass
class Summary:
    target: str
    cases: int = 0
    accepted: int = 0
    refused: int = 0
    foreign: int = 0
    slow: int = 0
    slowest_seconds: float = 0.0
    slowest_case: int = -1
    peak_megabytes: float = 0.0
    """Growth of the process over all its cases."""
    cpu_seconds: float = 0.0
    """Of all processes, with their start and the honest clients; the campaign adds it."""
    errors: dict[str, int] = field(default_factory=dict)


def _alarm(*_: object) -> None:
    raise TooSlow


@contextmanager
def limits(target: Target) -> Any:
    """The memory of this process, and a timer for each case."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + target.megabytes * MEGABYTE, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, _alarm)
    signal.signal(signal.SIGPROF, _alarm)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def attempt(target: Target, read: Read, data: bytes) -> tuple[str, str, float]:
    """How one case ended (empty if it was accepted, ``refused``, or the error), where, and its CPU seconds."""
    begin = time.process_time()
    outcome, place = "", ""
    try:
        # The clock on the wall also runs while other processes have the core: that one is only for what waits.
        signal.setitimer(signal.ITIMER_PROF, 2 * target.seconds)
        signal.setitimer(signal.ITIMER_REAL, 100 * target.seconds)
        try:
            read(data)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except FedelError:
        outcome = "refused"
    except (Exception, TooSlow) as error:
        outcome, place = type(error).__name__, _place(error)
    seconds = time.process_time() - begin
    if seconds > target.seconds and outcome in ("", "refused"):
        outcome, place = "TooSlow", "-"
    return outcome, place, seconds


def _place(error: BaseException) -> str:
    """The last line of the project's own code that the error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/fedel" in f.filename and "/site-packages/" not in f.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}"


def smaller(target: Target, read: Read, data: bytes, failure: tuple[str, str]) -> bytes:
    """A shorter input that fails in the same way; cuts out ever smaller pieces."""
    end, size = time.process_time() + _SMALLER_SECONDS, len(data) // 2
    while size and time.process_time() < end:
        at = 0
        while at < len(data) and time.process_time() < end:
            shorter = data[:at] + data[at + size :]
            if attempt(target, read, shorter)[:2] == failure:
                data = shorter
            else:
                at += size
        size //= 2
    return data


def run(target: Target, seed: int, first: int, last: int, progress: mmap.mmap | None = None) -> Summary:
    """Run the cases ``first`` to ``last`` - 1, and before them those of the corpus; prints findings."""
    summary, places = Summary(target.name), dict[str, int]()
    before = _peak_kilobytes()
    with tempfile.TemporaryDirectory() as folder:
        read = target.prepare(Path(folder))
        target.case(seed, 0)  # valid inputs are made without limits
        kept = [] if first else [path.read_bytes() for path in target.kept()]
        with limits(target):
            for number in range(first - len(kept), last):
                if progress is not None:
                    progress[:8] = number.to_bytes(8, "little", signed=True)
                data = kept[number - first] if number < first else target.case(seed, number)
                outcome, place, seconds = attempt(target, read, data)
                _count(summary, number, outcome, seconds)
                where = f"{outcome} {place}"
                if outcome not in ("", "refused") and places.setdefault(where, 0) < KEPT_PER_PLACE:
                    places[where] += 1
                    if outcome != "TooSlow":
                        data = smaller(target, read, data, (outcome, place))
                    _print(Finding(target.name, number, outcome, place, data.hex()))
    summary.peak_megabytes = round((_peak_kilobytes() - before) / 1024, 1)
    return summary


def _peak_kilobytes() -> int:
    """The most memory this process ever held; ``getrusage`` would begin with what its parent held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _count(summary: Summary, number: int, outcome: str, seconds: float) -> None:
    summary.cases += 1
    summary.accepted += outcome == ""
    summary.refused += outcome == "refused"
    summary.slow += outcome == "TooSlow"
    if outcome not in ("", "refused", "TooSlow"):
        summary.foreign += 1
    if outcome not in ("", "refused"):
        summary.errors[outcome] = summary.errors.get(outcome, 0) + 1
    if seconds > summary.slowest_seconds:
        summary.slowest_seconds, summary.slowest_case = round(seconds, 4), number


def _print(record: Finding | Summary) -> None:
    print(json.dumps({"kind": type(record).__name__, **asdict(record)}), flush=True)


def main() -> None:
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", help="names, with commas")
    parser.add_argument("seed", type=int)
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    parser.add_argument("progress", type=Path)
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    with options.progress.open("r+b") as file:
        progress = mmap.mmap(file.fileno(), 0)
    for place, name in enumerate(options.targets.split(",")):
        progress[8:16] = place.to_bytes(8, "little")
        _print(run(TARGETS[name], options.seed, options.first, options.last, progress))


if __name__ == "__main__":
    sys.exit(main())
