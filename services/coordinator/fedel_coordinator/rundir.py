"""A run's directory: ``config.toml``, ``rounds.jsonl``, ``result.json``. Written from the store, never read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedel import config


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, settings: Mapping[str, Any], records: Sequence[str]) -> None:
        """Begin, or after a restart repair: what the store knows is what the files say."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._replace("config.toml", config.write(settings))
        self._replace("rounds.jsonl", "".join(record + "\n" for record in records))

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").exists()

    def append(self, record: str) -> None:
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(record + "\n")

    def finish(self, result: Mapping[str, Any]) -> None:
        self._replace("result.json", json.dumps(result, indent=2) + "\n")

    def _replace(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.new"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)
