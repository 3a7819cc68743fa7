"""CPU seconds, memory and network of processes, as the kernel counts them in /proc (Linux only)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_SECONDS = 0.2


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on; the second, the name, may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def family(roots: Iterable[int], without: str = "") -> list[int]:
    """These processes and all that come from them and are alive; ``without`` leaves out those, and what comes
    from them, in whose command line it occurs."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(stat(int(entry.name))[1])
            except (OSError, IndexError):
                continue  # it has just ended
    found = [pid for pid in roots if pid in parents]
    for pid in found:  # grows while we look
        children = [child for child, parent in parents.items() if parent == pid and child not in found]
        found += [child for child in children if not without or without not in command(child)]
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").replace("\0", " ")
    except OSError:
        return ""


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes."""
    ticks = 0
    for pid in pids:
        try:
            ticks += sum(map(int, stat(pid)[11:13]))
        except OSError:
            continue
    return ticks / _TICKS


def peak_bytes(pids: Iterable[int]) -> int:
    """The most memory that each of them had resident, added up."""
    return sum(_status(pid, "VmHWM") for pid in pids)


def _status(pid: int, key: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), 0)


def loopback_bytes() -> int:
    """What the loopback of the whole machine carried so far."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) for line in lines if line.strip().startswith("lo:")), 0)


@dataclass(frozen=True)
class Mark:
    """The counters at the end of a round."""

    seconds: float
    cpu_seconds: float
    loopback_bytes: int
    each: tuple[float, ...] = ()
    """CPU seconds of each of the processes that were named, without what they started."""


@dataclass
class Watch:
    """Follows the processes of a server, and of a client, while rounds go on."""

    servers: tuple[int, ...]
    clients: tuple[int, ...] = ()
    without: str = ""
    """Occurs in the command line of processes that a server starts, but that are not part of it."""
    marks: list[Mark] = field(default_factory=list)
    server_peak: int = 0
    client_peak: int = 0
    """Of the client that took the most."""
    _end: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()
        self.look()

    def mark(self) -> None:
        """A round is over."""
        used = cpu_seconds(family(self.servers, self.without))
        each = tuple(cpu_seconds([server]) for server in self.servers)
        self.marks.append(Mark(time.monotonic(), used, loopback_bytes(), each))

    def look(self) -> None:
        with self._lock:
            self.server_peak = max(self.server_peak, peak_bytes(family(self.servers, self.without)))
            each = [peak_bytes(family([client])) for client in self.clients]
            self.client_peak = max([self.client_peak, *each])

    def _look(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            self.look()
