"""safetensors files, written and read tensor by tensor, so that no whole model is ever in memory.

The safetensors library is not used. Its writer needs all tensors in memory at once, while here they come one at
a time from the fold, or as the bytes of an upload. Its reader (``safe_open``) does not say where in the file a
tensor is, which a download needs to send whole stretches of the file without making arrays of them, and it took
1.2 times the CPU to read a model of 66 MB. The format is a length, a JSON table and the bytes; a test reads our
files with the library.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fedel.errors import ServiceError
from fedel.types import Array

_LENGTH_BYTES = 8
Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Name and shape of each tensor of a file, in order; all are float32."""


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor are in a file."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]


@contextmanager
def closed_on_error(handle: int) -> Iterator[None]:
    """Close a file that nobody will own because its opening failed: every refused upload would cost one."""
    try:
        yield
    except BaseException:
        os.close(handle)
        raise


def write_all(handle: int, offset: int, *pieces: bytes | memoryview) -> int:
    """Write pieces one after the other to the last byte, in one call if possible; returns the bytes written."""
    left, end = [memoryview(piece) for piece in pieces], offset
    while left:
        written = os.pwritev(handle, left, end)
        end += written
        # One call may write fewer bytes than it was given.
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return end - offset


def _layout(shapes: Shapes) -> tuple[bytes, dict[str, Place]]:
    """The beginning of a safetensors file, and where each tensor goes after it."""
    table, position = {}, 0
    for name, shape in shapes:
        end = position + 4 * int(np.prod(shape, dtype=np.int64))
        table[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, _places(table, _LENGTH_BYTES + len(text))


def _places(table: Mapping[str, Any], start: int) -> dict[str, Place]:
    places = {}
    for name, entry in table.items():
        begin, end = entry["data_offsets"]
        places[name] = Place(start + begin, end - begin, tuple(entry["shape"]))
    return places


class TensorWriter:
    """Fills a safetensors file."""

    def __init__(self, handle: int, shapes: Shapes) -> None:
        beginning, self.places = _layout(shapes)
        self._handle, self._start = handle, len(beginning)
        write_all(handle, 0, beginning)

    def put(self, name: str, values: Array) -> int:
        """Write one tensor; returns its checksum."""
        data = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data
        write_all(self._handle, self.places[name].offset, data)
        return zlib.crc32(data)

    def put_bytes(self, offset: int, *pieces: bytes | memoryview) -> int:
        """Write bytes of the tensors, counted from the first one's beginning; returns how many."""
        return write_all(self._handle, self._start + offset, *pieces)


class TensorFile:
    """A safetensors file, open for reading."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        with closed_on_error(self._handle):
            length = int.from_bytes(os.pread(self._handle, _LENGTH_BYTES, 0), "little")
            table = json.loads(os.pread(self._handle, length, _LENGTH_BYTES))
            table.pop("__metadata__", None)
            self._path, self.places = path, _places(table, _LENGTH_BYTES + length)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)

    def tensor(self, name: str) -> Array:
        place = self.places[name]
        values: Array = np.empty(place.shape, "<f4")
        view, offset = values.reshape(-1).view(np.uint8).data, place.offset
        while view:
            count = os.preadv(self._handle, [view], offset)
            if count == 0:
                raise ServiceError(f"{self._path}: tensor '{name}' is cut off; restore the file from a copy")
            view, offset = view[count:], offset + count
        return values

    def read(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._handle, num_bytes, offset)
