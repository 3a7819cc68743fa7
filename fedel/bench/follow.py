"""Follows a system whose driver writes a line into the file ``rounds`` at the end of every round."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from fedel.bench import machine
from fedel.bench.load import Load, Outcome
from fedel.bench.proc import Watch, stat
from fedel.errors import ServiceError

ROUNDS = "rounds"
LOOK_SECONDS = 0.05
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SPARE_BYTES = 2 << 30
"""A system that leaves less of the machine's memory free is ended, before the kernel ends something else."""


def follow(
    load: Load,
    folder: Path,
    watch: Watch,
    needed: Iterable[int],
    clients: Callable[[], Iterable[int]] = lambda: (),
) -> Outcome:
    """Mark every round until all are there, a ``needed`` process ends, or time or memory is used up."""
    file, needed, deadline = folder / ROUNDS, tuple(needed), time.monotonic() + load.seconds
    file.touch()
    with watch:
        while True:
            alive = all(
                _is_alive(pid) for pid in needed
            )  # before the file: its last line may come with the end
            for _ in range(len(file.read_bytes().splitlines()) - len(watch.marks)):
                watch.mark()
                watch.clients = tuple(clients())
            if len(watch.marks) >= load.num_rounds:
                return Outcome(watch)
            where = f"after {len(watch.marks)} of {load.num_rounds} rounds"
            if machine.available_bytes() < SPARE_BYTES:
                peak = f"the server had {watch.server_peak / 1e9:.1f} GB"
                raise ServiceError(f"ended {where}: the machine's memory was used up; {peak}")
            if time.monotonic() > deadline:
                raise ServiceError(f"ended {where}: more than {load.seconds:g} s; {last_line(folder)}")
            if not alive:
                raise ServiceError(f"{where}: {last_line(folder)}")
            time.sleep(LOOK_SECONDS)


def _is_alive(pid: int) -> bool:
    try:
        return stat(pid)[0] != "Z"
    except OSError:
        return False


def last_line(folder: Path) -> str:
    """What the server said last; or else a client."""
    for log in (folder / "server.log", *sorted(folder.glob("*.log"))):
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        lines = _COLOURS.sub("", text).split("\n")
        said = [line.strip() for line in lines if line.strip()]
        if said:
            return f"{log.stem}: {said[-1][:300]}"
    return "it said nothing"
