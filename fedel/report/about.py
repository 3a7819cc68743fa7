"""The line below a report's title: which run, of what, made when and with which version."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedel.report.figures import labels
from fedel.report.runs import StoredRun
from fedel.report.words import clock, plural


def facts(run: StoredRun) -> dict[str, str]:
    """What a reader has to know about a run, in the order in which it is shown; nothing that is not known."""
    workload = _table(run, "workload")
    fleet = plural(run.num_clients, "client")
    per_round = _table(run, "rounds").get("num_participants", 0)
    if isinstance(per_round, int) and 0 < per_round < run.num_clients:
        fleet += f", {per_round} per round"
    seed = run.settings.get("seed", run.result.seed if run.result else None)
    version = run.result.versions.get("fedel", "") if run.result else ""
    known = {
        "run": f"run {run.name}",
        "model": f"model {workload['model']}" if "model" in workload else "",
        "data": _data(run),
        "clients": fleet if run.num_clients else "",
        "seed": "" if seed is None else f"seed {seed}",
        "clock": clock(run).replace("virtual, ", "simulated: ").replace("virtual", "simulated"),
        "version": f"FedEL {version}" if version else "",
        "date": _date(run),
        "phase": "" if run.phase == "finished" else run.phase,
    }
    return {name: said for name, said in known.items() if said}


def about(runs: Sequence[StoredRun]) -> list[str]:
    """First what all runs share, then, for several runs, one line with the rest of each."""
    each = [facts(run) for run in runs]
    if len(each) == 1:
        return [" · ".join(each[0].values())]
    shared = {
        name: said for name, said in each[0].items() if all(said == other.get(name) for other in each[1:])
    }
    lines = [" · ".join(shared.values())] if shared else []
    for label, known in zip(labels(runs), each, strict=True):
        own = [said for name, said in known.items() if name not in shared]
        lines.append(f"{label}: {' · '.join(own)}")
    return lines


def _table(run: StoredRun, name: str) -> dict[str, Any]:
    found = run.settings.get(name, {})
    return found if isinstance(found, dict) else {}


def _data(run: StoredRun) -> str:
    data, partition = _table(run, "workload").get("data", ""), _table(run, "partition")
    if not data:
        return ""
    method = partition.get("method", "")
    alpha = f" {partition['alpha']}" if "alpha" in partition and str(method).startswith("dirichlet") else ""
    return f"data {data}" + (f", split {method}{alpha}" if method else "")


def _date(run: StoredRun) -> str:
    """When it began; of a simulation, which has no such record, when its last file was written."""
    begin = run.rounds[0].opened_at if run.rounds and not run.is_virtual else 0.0
    if begin <= 0:
        written = [run.path / name for name in ("result.json", "rounds.jsonl", "config.toml")]
        begin = next((_written_at(file) for file in written if file.exists()), 0.0)
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(begin)) if begin > 0 else ""
    except (OverflowError, ValueError, OSError):
        return ""  # a damaged record


def _written_at(file: Path) -> float:
    return file.stat().st_mtime
