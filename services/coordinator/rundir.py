"""A run's directory: ``config.toml``, ``rounds.jsonl``, ``result.json``. Written from the store, never read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RunDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, settings: Mapping[str, Any], records: Sequence[str]) -> None:
        """Begin, or after a restart repair: what the store knows is what the files say."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._replace("config.toml", to_toml(settings))
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


def to_toml(table: Mapping[str, Any]) -> str:
    """A table of strings, numbers, truth values, lists and tables as TOML; ``None`` is left out.

    >>> print(to_toml({"seed": 1, "work": {"lr": 0.1, "name": "a\\"b"}}), end="")
    seed = 1
    <BLANKLINE>
    [work]
    lr = 0.1
    name = "a\\"b"
    """
    return "\n".join(_sections(table, ())).lstrip("\n") + "\n"


def _sections(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    values = {k: v for k, v in table.items() if v is not None and not isinstance(v, Mapping)}
    lines = [f"\n[{'.'.join(map(_key, path))}]"] if path else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += _sections(value, (*path, key))
    return lines


def _key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    return repr(value) if isinstance(value, (int, float)) else _string(str(value))


def _string(text: str) -> str:
    # JSON escapes are TOML escapes, except that TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
