"""The checksums of files and messages are those of zlib, with ISA-L and without."""

import importlib
import sys
import zlib

import numpy as np
import pytest

from fedel import checksum

DATA = np.random.default_rng(1).bytes(100_003)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 255, 4096, len(DATA)])
def test_same_as_zlib(size: int) -> None:
    for data in (DATA[:size], memoryview(DATA)[3 : 3 + size], np.frombuffer(DATA[:size], np.uint8).data):
        assert zlib.crc32(data) == checksum.crc32(data)
        assert zlib.crc32(data, 0xDEADBEEF) == checksum.crc32(data, 0xDEADBEEF)


def test_in_pieces() -> None:
    crc = 0
    for start in range(0, len(DATA), 7001):
        crc = checksum.crc32(DATA[start : start + 7001], crc)
    assert zlib.crc32(DATA) == crc


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal", None)
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        assert zlib.crc32 is importlib.reload(checksum)._crc32
    importlib.reload(checksum)
