"""A small disk of its own for a server, which can be full. Only root may mount one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PIECE = b"\0" * (1 << 20)


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextmanager
def small_disk(folder: Path, megabytes: int = 96) -> Iterator[bool]:
    """A file system of limited size in memory, at ``folder``; false if it could not be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "fedel-chaos", str(folder)]
    mounted = can_mount() and subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            # The audit reads these files, and they are kept if it finds something: copy them out.
            copy = folder.with_name(f"{folder.name}.copy")
            shutil.copytree(folder, copy)
            subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
            shutil.rmtree(folder)
            copy.rename(folder)


def fill(folder: Path) -> None:
    """Leave not a byte."""
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(_PIECE)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def free(folder: Path) -> None:
    (folder / "filler").unlink(missing_ok=True)
