"""How much of the device's memory training may take in one run: less, once it has run out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from fedel.core.memory_budget import least_bytes, whole_bytes
from fedel.errors import ServiceError
from fedel.types import Strategy, Task, Trainer
from fedel_edge.checked_files import read_record, write_record

_log = logging.getLogger(__name__)
T = TypeVar("T")

SHARE = 0.8
"""What is left of a limit that was too high."""
_SIGNS = ("allocate memory", "not enough memory", "out of memory", "bad_alloc")
"""In the text of torch's errors, which have no type of their own on a CPU."""


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)
    )


class LimitLowered(Exception):
    """Memory ran out, and the limit is lower now: the task begins again."""


class MemoryLimit:
    """The limit that this device found out by itself; kept in the folder of the run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def found(self) -> int:
        """Bytes; 0 if memory never ran out."""
        record = read_record(self._path)
        found = record[0].get("bytes") if record else 0
        return found if isinstance(found, int) and found > 0 else 0

    def keep(self, num_bytes: int) -> None:
        write_record(self._path, {"bytes": num_bytes}, {})


def within_memory(task: Task, trainer: Trainer, limit: MemoryLimit) -> Task:
    """The task with the least limit known: the owner's, the server's, or what was found out here."""
    known = (trainer.profile.memory_limit_bytes, task.memory_bytes, limit.found())
    return replace(task, memory_bytes=min((num_bytes for num_bytes in known if num_bytes), default=0))


def fit_in_memory(
    fit: Callable[[Task], T], task: Task, strategy: Strategy, trainer: Trainer, limit: MemoryLimit
) -> T:
    """``fit`` within the memory of this device.

    Where memory runs out all the same, the limit is lowered for the rest of the run, and ``LimitLowered`` says
    that the task is to begin again, with a smaller selection. A method that does not look at the limit would
    only do the same again: it fails.
    """
    limited = within_memory(task, trainer, limit)
    try:
        return fit(limited)
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        said = str(error) or type(error).__name__
        lowered = lower(limited.memory_bytes, trainer) if strategy.fits_memory else 0
    if not lowered:
        raise ServiceError(
            f"memory ran out ({said}), and the method has no smaller piece of work for this device: lower"
            " work.batch_size in the job, use FedEL, or take a smaller model"
        )
    _log.warning(
        "memory ran out (%s): training takes at most %d MB here for the rest of the run, and this round goes on"
        " with less",
        said,
        lowered // 10**6,
    )
    limit.keep(lowered)  # here, where what the failed attempt held is free again
    raise LimitLowered


def lower(allowed: int, trainer: Trainer) -> int:
    """The next lower limit; 0 if no step fits it, or if memory was not measured."""
    spec, use = trainer.spec, trainer.profile.memory
    if use is None:
        return 0
    whole = whole_bytes(spec, use)
    lowered = int(min(allowed or whole, whole) * SHARE)
    return lowered if lowered >= least_bytes(spec, use) else 0
