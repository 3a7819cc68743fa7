"""The updates of closed rounds, kept so that ``fedel audit`` can compute versions again from them.

``updates/<round>`` is the round's journal as it was when the round closed, and beside the updates
``version.json``: the facts about the version that they made, which stay after the version itself is deleted.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fedel.files import sync_directory, write_atomic

META_FILE = "version.json"


class KeptUpdates:
    """The last rounds of one run; of ``num_rounds`` 0 keeps none and -1 all.

    An audit begins with a version on disk, so every n-th version stays as long as the updates after it: at
    least the last n rounds are kept, and less than twice as many.
    """

    def __init__(self, folder: Path, num_rounds: int) -> None:
        self._folder, self._num_rounds = folder, num_rounds

    def __bool__(self) -> bool:
        return self._num_rounds != 0

    def rounds(self) -> list[int]:
        return sorted(int(path.name) for path in self._folder.glob("[0-9]*"))

    def path(self, round_num: int) -> Path:
        return self._folder / f"{round_num:06d}"

    def keep(self, journal: Path, meta: Path) -> None:
        """Move the journal of a closed round here, with the facts about the version it made."""
        self._folder.mkdir(exist_ok=True)
        target = self.path(int(journal.name))
        for unfinished in journal.glob("*.part"):
            unfinished.unlink()
        write_atomic(journal / META_FILE, meta.read_bytes())
        shutil.rmtree(target, ignore_errors=True)
        journal.rename(target)
        sync_directory(self._folder)
        self._forget_old()

    def _forget_old(self) -> None:
        every, rounds = self._num_rounds, self.rounds()
        if every > 0:
            first = (rounds[-1] + 1 - every) // every * every
            for old in rounds:
                if old < first:
                    shutil.rmtree(self.path(old))

    def needs(self, version: int) -> bool:
        """Whether an audit begins with this version."""
        every, oldest = self._num_rounds, next(iter(self.rounds()), None)
        if not self or oldest is None or version < oldest:
            return False
        return version == oldest or (every > 0 and version % every == 0)
