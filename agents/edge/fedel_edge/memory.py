"""A client's memories on disk, one file per round, so that a device continues where it was after a restart."""

from __future__ import annotations

from pathlib import Path

from fedel.types import Memory, Window
from fedel_edge.checked_files import drop, read_record, write_record

_KEPT = 3


class DiskMemories:
    """``memory-<round>``. Three are kept: the one last loaded, to which lost rounds go back, and the newest."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: int | None = None

    def load(self, round_num: int) -> Memory | None:
        """The memory staged in that round; ``None`` if it is missing or damaged."""
        path = self._path(round_num)
        found = read_record(path)
        if found is None:
            return None
        record, tensors = found
        try:
            memory = Memory(
                window=Window(*record["window"]) if record["window"] else None,
                selected=tuple(record["selected"]),
                resets=int(record["resets"]),
                rounds_held=int(record["rounds_held"]),
                tensors=tensors,
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:  # of another version of FedEL
            drop(path, error)
            return None
        self._loaded = round_num
        return memory

    def stage(self, round_num: int, memory: Memory) -> None:
        window = memory.window
        record = {
            "window": [window.end, window.front] if window else None,
            "selected": list(memory.selected),
            "resets": memory.resets,
            "rounds_held": memory.rounds_held,
        }
        write_record(self._path(round_num), record, memory.tensors)
        self._forget_old()

    def _forget_old(self) -> None:
        rounds = numbered(self._folder, "memory-")
        newest = [r for r in rounds if r != self._loaded]
        room = _KEPT - (self._loaded in rounds)
        for old in newest[:-room]:
            self._path(old).unlink(missing_ok=True)

    def _path(self, round_num: int) -> Path:
        return self._folder / f"memory-{round_num}"


def numbered(folder: Path, prefix: str) -> list[int]:
    """The rounds of which there is a file with this prefix, in order."""
    ends = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*"))
    return sorted(int(end) for end in ends if end.isdecimal())
