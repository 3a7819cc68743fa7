"""What can be done to a federation: each fault strikes one process, link, disk or database, and passes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedel.chaos import disk
from fedel.chaos.federation import COORDINATOR, DATABASE, Federation, Layout

KILL, FREEZE, CLOCK = "kill", "freeze", "clock"
CUT, HOLD, DELAY, THROTTLE, DAMAGE = "cut", "hold", "delay", "throttle", "damage"
FULL_DISK, RESTART = "full disk", "restart"
_LINK_FAULTS = (CUT, HOLD, DELAY, THROTTLE)


@dataclass(frozen=True)
class Fault:
    """When it strikes, what it does, and for how long."""

    round_num: int
    """It strikes once this round is open,"""
    after_seconds: float
    """this long after that."""
    kind: str
    target: str
    seconds: float
    amount: float = 0.0
    """Seconds of a delay or of a clock's jump; bytes per second of a slow link."""

    def __str__(self) -> str:
        amount = {
            DELAY: f", {self.amount:.2f} s each way",
            THROTTLE: f", {self.amount / 1000:.0f} kB/s",
            CLOCK: f" by {self.amount:+.0f} s",
        }.get(self.kind, "")
        lasts = "" if self.kind in (CLOCK, DAMAGE) else f" for {self.seconds:.1f} s"
        return f"{self.kind} {self.target}{amount}{lasts}"


def draw_fault(rng: np.random.Generator, layout: Layout, round_num: int, servers_live: bool = False) -> Fault:
    """A fault from the dice; ``servers_live`` kills no server, so that their memory can be watched."""
    kinds: list[tuple[str, float]] = [
        (KILL, 3), (FREEZE, 1.5), (CLOCK, 0.5), (CUT, 2), (HOLD, 1), (DELAY, 1), (THROTTLE, 1), (DAMAGE, 1.5),
        (FULL_DISK, 1),
    ]  # fmt: skip
    if layout.database == "postgresql":
        kinds.append((RESTART, 1.5))
    weights = np.array([weight for _, weight in kinds])
    kind = kinds[int(rng.choice(len(kinds), p=weights / weights.sum()))][0]
    after, seconds = float(rng.uniform(0, 0.6)), float(rng.uniform(0.2, 3.0))
    target = _draw_target(rng, layout, kind, servers_live)
    amount = {
        DELAY: float(rng.uniform(0.02, 0.3)),
        THROTTLE: float(rng.uniform(20e3, 200e3)),
        CLOCK: float(rng.choice([-86_400, -60, 60, 86_400])),
    }.get(kind, 0.0)
    return Fault(round_num, after, kind, target, seconds, amount)


def _draw_target(rng: np.random.Generator, layout: Layout, kind: str, servers_live: bool) -> str:
    def one_of(names: Sequence[str]) -> str:
        return str(rng.choice(list(names)))

    if kind == RESTART:
        return DATABASE
    if kind == FULL_DISK:
        return one_of(layout.servers)
    bulk = [f"agents>{name}" for name in layout.aggregators]
    if kind == DAMAGE:
        return one_of(bulk)
    if kind in _LINK_FAULTS:
        sessions = [f"{name}>{COORDINATOR}" for name in layout.agents]
        return one_of(
            [one_of(bulk), one_of([f"{COORDINATOR}>{name}" for name in layout.aggregators]), one_of(sessions)]
        )
    spared = servers_live and kind == KILL
    return one_of(layout.agents if spared else [one_of(layout.servers), one_of(layout.agents)])


async def strike(made: Federation, fault: Fault) -> str:
    """Carry a fault out and let it pass; returns what could not be done, if anything."""
    if fault.kind == RESTART:
        async with made.database_lock:
            await _restart_database(made, fault)
    elif fault.kind == FULL_DISK:
        return await _full_disk(made, fault)
    elif fault.kind in (KILL, FREEZE, CLOCK):
        async with made.processes[fault.target].lock:
            await _disturb_process(made, fault)
    else:
        await _disturb_link(made, fault)
    return ""


async def _restart_database(made: Federation, fault: Fault) -> None:
    """It runs again afterwards, also if the drill ends meanwhile: the next one uses it too."""
    assert made.database is not None, "drawn only with PostgreSQL"
    await asyncio.to_thread(made.database.stop)
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await asyncio.to_thread(made.database.start)


async def _disturb_process(made: Federation, fault: Fault) -> None:
    process = made.processes[fault.target]
    if fault.kind == KILL:
        process.kill()
        await asyncio.sleep(fault.seconds)
        process.start()
        await process.ready()
    elif fault.kind == FREEZE:
        process.send(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        process.send(signal.SIGCONT)
    else:
        process.move_clock(fault.amount)


async def _disturb_link(made: Federation, fault: Fault) -> None:
    link = made.links[fault.target]
    begin: dict[str, Callable[[], None]] = {CUT: link.cut, HOLD: link.hold}
    if fault.kind in begin:
        begin[fault.kind]()
    elif fault.kind == DELAY:
        link.delay_seconds = fault.amount
    elif fault.kind == THROTTLE:
        link.bytes_per_second = fault.amount
    else:
        link.damage = True
        await asyncio.sleep(fault.seconds)
        return
    await asyncio.sleep(fault.seconds)
    link.mend()


async def _full_disk(made: Federation, fault: Fault) -> str:
    """Nobody kills the server meanwhile: with a full disk it could not start again."""
    if fault.target not in made.disks:
        return "no small disk could be mounted"
    process, folder = made.processes[fault.target], made.disks[fault.target]
    async with process.lock:
        try:
            await asyncio.to_thread(disk.fill, folder)
            await asyncio.sleep(fault.seconds)
        finally:
            disk.free(folder)
    return ""
