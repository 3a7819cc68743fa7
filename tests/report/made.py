"""Directories of runs that nobody ran."""

import json
import struct
from pathlib import Path
from typing import Any

from fedel.report import runs
from fedel.report.runs import StoredRun
from tests.report.fakes import client_record, result, round_record

WORKLOAD = '[workload]\nmodel = "cnn"\ndata = "digits"\n'


def write_run(
    path: Path,
    strategy: str = "fedel",
    latency: float = 1.0,
    accuracies: Any = (),
    window: tuple[int, int] | None = None,
    *,
    virtual: bool = False,
    scope: str = "",
    num_classes: int = 0,
    finished: bool = True,
    settings: str = "",
    of_round: Any = lambda number: {},
) -> StoredRun:
    """A run of two clients; ``of_round`` changes the record of a round."""
    path.mkdir()
    (path / "config.toml").write_text(f'seed = 3\n[strategy]\nname = "{strategy}"\n{WORKLOAD}{settings}')
    lines = []
    for number, accuracy in enumerate(accuracies):
        clients = [
            client_record(client=name, window=window, train_seconds=latency, deviation=latency - 1.0)
            for name in ("one", "two")
        ]
        facts = {
            "round": number,
            "latency_seconds": latency,
            "accuracy": accuracy,
            "bytes_up": 1_000_000,
            "bytes_down": 2_000_000,
            "clients": tuple(clients),
            "num_tasks": 2,
            "num_updates": 2,
            "wall_seconds": 0.5 if virtual else None,
            "scope": scope,
        }
        lines.append(round_record(**(facts | of_round(number))).to_json() + "\n")
    (path / "rounds.jsonl").write_text("".join(lines))
    if finished:
        seconds = latency * len(lines) if virtual else None
        versions = {"fedel": "1.2.3"}
        made = result(virtual_seconds=seconds, scope=scope, versions=versions)
        (path / "result.json").write_text(made.to_json())
    if num_classes:
        write_model(path, num_classes)
    return runs.load(path)


def write_model(path: Path, num_classes: int) -> None:
    """The head of a model whose last weight is ``b``, as in the fake result."""
    shapes = {"a": [16, 8], "b": [num_classes], "exits.a.linear.bias": [num_classes]}
    entries = {n: {"dtype": "F32", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
