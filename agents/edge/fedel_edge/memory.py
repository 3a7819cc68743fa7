"""A client's memories on disk, one file per round, so that a device continues where it was after a restart."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from fedel.files import write_atomic
from fedel.types import Memory, Window

_log = logging.getLogger(__name__)
_KEPT = 3


class DiskMemories:
    """``memory-<round>.json``, with ``memory-<round>.safetensors`` beside it where a method keeps tensors.

    Three are kept: the one last loaded, to which lost rounds go back, and the newest.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: int | None = None

    def load(self, round_num: int) -> Memory | None:
        """The memory staged in that round; ``None`` if it is missing or damaged."""
        path = self._path(round_num)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            tensors = load_file(path.with_suffix(".safetensors")) if record["has_tensors"] else {}
            memory = Memory(
                window=Window(*record["window"]) if record["window"] else None,
                selected=tuple(record["selected"]),
                resets=int(record["resets"]),
                rounds_held=int(record["rounds_held"]),
                tensors=tensors,
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            _log.warning("%s is damaged (%s): continuing from the coordinator's copy", path, error)
            return None
        self._loaded = round_num
        return memory

    def stage(self, round_num: int, memory: Memory) -> None:
        path, window = self._path(round_num), memory.window
        record: dict[str, Any] = {
            "window": [window.end, window.front] if window else None,
            "selected": list(memory.selected),
            "resets": memory.resets,
            "rounds_held": memory.rounds_held,
            "has_tensors": bool(memory.tensors),
        }
        if memory.tensors:
            write_atomic(path.with_suffix(".safetensors"), save(dict(memory.tensors)))
        write_atomic(path, json.dumps(record))
        self._forget_old()

    def _forget_old(self) -> None:
        rounds = sorted(int(path.stem.removeprefix("memory-")) for path in self._folder.glob("memory-*.json"))
        newest = [r for r in rounds if r != self._loaded]
        room = _KEPT - (self._loaded in rounds)
        for old in newest[:-room]:
            self._path(old).unlink(missing_ok=True)
            self._path(old).with_suffix(".safetensors").unlink(missing_ok=True)

    def _path(self, round_num: int) -> Path:
        return self._folder / f"memory-{round_num}.json"
