"""Where the user's own models, data and trainers are searched: after everything that is installed."""

from __future__ import annotations

import sys
from pathlib import Path


def folders(job: Path | None = None) -> list[str]:
    """The working directory, then the folder of the job file."""
    found = [Path.cwd()] if job is None else [Path.cwd(), job.absolute().parent]
    return list(dict.fromkeys(map(str, found)))


def search(job: Path | None = None) -> None:
    """Let ``package.module:function`` of a job find the user's code.

    Last, never first: a file of the user's named ``queue.py`` must not replace the standard library's.
    """
    sys.path.extend(folder for folder in folders(job) if folder not in sys.path)
