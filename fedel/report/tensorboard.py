"""Writes a run as event files for TensorBoard, which need not be installed."""

from __future__ import annotations

from pathlib import Path

from fedel.errors import ConfigError
from fedel.report.runs import StoredRun
from fedel.report.scalars import of_clients, of_round

ENDING = ".fedel"


def write(run: StoredRun, directory: Path) -> Path:
    """Write a run into a folder of its own below ``directory``; returns the file. Steps are rounds, from 1.

    The time of a step is when its round closed: Unix time, or in a simulation seconds of the virtual clock.
    """
    try:
        from tensorboardX import SummaryWriter  # takes seconds to import
    except ImportError:
        raise ConfigError("event files need tensorboardX; install it: pip install tensorboardX") from None
    folder = directory / run.name
    for old in folder.glob(f"events.out.tfevents.*{ENDING}"):
        old.unlink()  # otherwise TensorBoard would draw both
    begin = run.rounds[0].opened_at if run.rounds else 0.0
    with SummaryWriter(str(folder), filename_suffix=ENDING) as writer:
        for record, seconds in zip(run.rounds, run.seconds(), strict=True):
            for tag, value in (*of_round(record), *of_clients(record)):
                writer.add_scalar(tag, value, record.round + 1, walltime=begin + seconds)
    (file,) = folder.glob(f"events.out.tfevents.*{ENDING}")
    return file
