"""Where the user's own models, data and trainers are searched: after everything that is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedel import plugins
from fedel.job import RunConfig


def folders(job: Path | None = None) -> list[str]:
    """The working directory, then the folder of the job file."""
    found = [Path.cwd()] if job is None else [Path.cwd(), job.absolute().parent]
    return list(dict.fromkeys(map(str, found)))


def search(job: Path | None = None) -> None:
    """Let ``package.module:function`` of a job find the user's code.

    Last, never first: a file of the user's named ``queue.py`` must not replace the standard library's.
    """
    sys.path.extend(folder for folder in folders(job) if folder not in sys.path)


def packages(job: RunConfig) -> list[str]:
    """What a job names, for processes that its author starts: whole packages of the author's choice."""
    named = [(job.trainer, ""), (job.workload.model, "fedel.models"), (job.workload.data, "fedel.data")]
    named += [(name, "fedel.strategies") for name in _methods(job.strategy)]
    paths = [name if ":" in name else plugins.registered(group).get(name, "") for name, group in named]
    modules = [path.partition(":")[0] for path in paths if ":" in path]
    tops = {module if module.startswith("fedel.") else module.partition(".")[0] for module in modules}
    return sorted(tops - sys.stdlib_module_names)


def _methods(strategy: Mapping[str, Any]) -> Iterator[str]:
    yield str(strategy.get("name", ""))
    if isinstance(base := strategy.get("base"), Mapping):
        yield from _methods(base)
