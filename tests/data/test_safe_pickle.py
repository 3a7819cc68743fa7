"""Pickles that ask for time or memory beyond all measure."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

from fedel.data.safe_pickle import load_numbers

RECONSTRUCT = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
LONG_TEXT = b"X" + struct.pack("<I", 1_000_000) + b"a" * 1_000_000

BOMBS = {
    "a huge memo": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a huge string": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "a huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",
    "a huge array": RECONSTRUCT + b"\x8a\x05\x00\x00\x00\x00\x10\x85U\x01b\x87R.",
    "a key that takes for ever": b"\x80\x02}" + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "one text encoded ten thousand times": b"\x80\x02](c_codecs\nencode\nq\x00"
    + LONG_TEXT
    + b"q\x01X\x06\x00\x00\x00latin1q\x02"
    + b"h\x00h\x01h\x02\x86R" * 10_000
    + b"e.",
    "an array of texts": pickle.dumps({"data": np.zeros(3, "S100")}, protocol=2),
    "nothing on the stack": b"\x80\x02R.",
    "a label that is a list of itself": b"\x80\x02]q\x00h\x00a.",
}


READ_ALL = """
import resource, sys, time
from pathlib import Path
from fedel.data.safe_pickle import load_numbers
from fedel.errors import DataError

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 10**9,) * 2)
for path in sys.argv[1:]:
    begin = time.perf_counter()
    try:
        load_numbers(Path(path))
        result = "read"
    except Exception as error:
        result = type(error).__name__
    print(Path(path).name, result, "slow" if time.perf_counter() - begin > 2 else "", sep=":", flush=True)
"""


def test_a_pickle_cannot_take_time_or_memory(tmp_path: Path) -> None:
    for name, content in BOMBS.items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "-c", READ_ALL, *(str(tmp_path / name) for name in BOMBS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert [f"{name}:DataError:" for name in BOMBS] == done.stdout.splitlines(), done.stderr


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    batch = {
        "data": np.arange(12, dtype=">f4").reshape(3, 4).T,
        "labels": [1, -5, 2**40],
        b"x": b"\xff",
        "n": None,
    }
    for protocol in (2, 3, 4):
        (tmp_path / "batch").write_bytes(pickle.dumps(batch, protocol=protocol))
        found = load_numbers(tmp_path / "batch")
        np.testing.assert_array_equal(batch["data"], found[b"data"])
        assert ([1, -5, 2**40], b"\xff", None) == (found[b"labels"], found[b"x"], found[b"n"])
