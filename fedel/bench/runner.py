"""Measures sections and stores every row at once, so that a run that was interrupted goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fedel.bench import machine
from fedel.bench.section import Options, Row, Say, Section
from fedel.serialisation import parse_json, to_json

FILE = "rows.jsonl"
MACHINE = "machine"
"""Section of the rows that tell when a run began or ended, and where."""
END = "end"
"""Section of the rows that say that a section is complete."""


def run(chosen: Sequence[Section], options: Options, out: Path, say: Say) -> list[Row]:
    """All rows of ``out``. What it has from the same options is not measured again."""
    out.mkdir(parents=True, exist_ok=True)
    store = Store(out / FILE)
    asked = _as_json(options)
    for section in chosen:
        if any(row["what"] == section.name and row["options"] == asked for row in store.of(END)):
            say(f"{section.name}: measured before")
            continue
        store.add(MACHINE, {"what": f"before {section.name}", "load": machine.load(), **machine.describe()})
        say(f"{section.name}: {section.title}")
        with tempfile.TemporaryDirectory(prefix=".measured-", dir=out) as folder:
            _measure(section, dataclasses.replace(options, folder=Path(folder)), store, say)
        store.add(END, {"what": section.name, "options": asked, "load": machine.load()})
    return store.rows


def _measure(section: Section, options: Options, store: Store, say: Say) -> None:
    before, begin = machine.load(), time.monotonic()
    for row in section.measure(dataclasses.replace(options, rows=store.of(section.name)), say):
        took = round(time.monotonic() - begin, 2)
        store.add(
            section.name, row | {"load_before": before, "load_after": machine.load(), "took_seconds": took}
        )
        before, begin = machine.load(), time.monotonic()


def _as_json(options: Options) -> dict[str, Any]:
    fields = (f for f in dataclasses.fields(options) if f.compare)
    made: dict[str, Any] = parse_json(to_json({f.name: getattr(options, f.name) for f in fields}))
    return made


class Store:
    """A file with one row per line. The last row of a name counts."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._rows: dict[tuple[str, str], Row] = {}
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line that was being written when the machine stopped
            self._rows[row["section"], row["what"]] = row

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def of(self, section: str) -> list[Row]:
        return [row for row in self.rows if row["section"] == section]

    def add(self, section: str, row: Row) -> None:
        at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        full = {"section": section, "at": at} | row
        with self._file.open("a", encoding="utf-8") as file:
            file.write(to_json(full) + "\n")
        self._rows[section, full["what"]] = parse_json(to_json(full))
