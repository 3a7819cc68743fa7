"""How time and memory are measured: what the work itself took, also on a machine that others share."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

Stamp = float | torch.cuda.Event
"""A moment: seconds on a CPU, an event in the stream on a GPU."""

_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def stamp(device: torch.device) -> Stamp:
    """Now. With one thread it is the process's CPU time, which does not count waiting for a busy core."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_between(begin: Stamp, end: Stamp) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin


def timed(device: torch.device, work: Callable[[], object]) -> float:
    begin = stamp(device)
    work()
    return seconds_between(begin, stamp(device))


def resident_bytes(device: torch.device) -> int:
    """In use now: of the device on a GPU, else by this process."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status_bytes("VmRSS") or _most_ever()


def reset_peak_memory(device: torch.device) -> None:
    """Start a new high-water mark; where the system offers none, the mark of the whole process stays."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return


def peak_memory_bytes(device: torch.device) -> int:
    """The high-water mark since the last reset: of the device on a GPU, else of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return _status_bytes("VmHWM") or _most_ever()


def _status_bytes(name: str) -> int:
    """A line of Linux's account of this process; 0 on other systems."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _most_ever() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
