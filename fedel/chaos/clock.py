"""Runs a module in a process whose wall clock the drill can move.

Only ``time.time`` moves, which is what our code asks for the time of day. The system's clock stays, and so does
``time.monotonic``, as when somebody sets a machine's clock.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

_FORMAT = "<d"


def write_offset(file: Path, seconds: float) -> None:
    """Move the clock of the process that was started with this file; it notices at once."""
    data = struct.pack(_FORMAT, seconds)
    if not file.exists():
        file.write_bytes(data)
    with file.open("r+b") as open_file:
        open_file.write(data)


def main() -> None:
    path, module = sys.argv[1:3]
    with Path(path).open("rb") as file:
        offset = mmap.mmap(file.fileno(), struct.calcsize(_FORMAT), prot=mmap.PROT_READ)
    real = time.time

    def moved() -> float:
        return real() + float(struct.unpack(_FORMAT, offset[:])[0])

    time.time = moved
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
