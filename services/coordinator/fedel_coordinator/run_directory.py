"""A run's directory: ``config.toml``, ``rounds.jsonl``, ``result.json``. Written from the store, never read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedel import config
from fedel.files import open_atomic, write_atomic
from fedel.records import RunResult


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, settings: Mapping[str, Any], records: Iterable[str]) -> None:
        """Begin, or repair after a restart: the files say what the store says."""
        write_atomic(self.path / "config.toml", config.write(settings))
        with open_atomic(self.path / "rounds.jsonl") as file:
            file.writelines(f"{record}\n".encode() for record in records)

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    def append(self, record: str) -> None:
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(record + "\n")

    def finish(self, result: RunResult) -> None:
        write_atomic(self.path / "result.json", result.to_json())
