"""Files that are whole or not there: written to a temporary name, synced, renamed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote


def safe_name(name: str) -> str:
    """A run's name as the name of a directory, whatever characters it has.

    >>> safe_name("vgg16/night 2"), safe_name("..")
    ('vgg16%2Fnight%202', '%2E%2E')
    """
    return quote(name, safe="").replace(".", "%2E")


def write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
