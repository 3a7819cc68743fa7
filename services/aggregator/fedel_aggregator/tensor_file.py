"""safetensors files, written and read tensor by tensor, so that no whole model is ever in memory.

The safetensors library is not used. Its writer needs all tensors in memory at once, while here they come one at
a time from the fold, or as the bytes of an upload. Its reader (``safe_open``) does not say where in the file a
tensor is, which a download needs to send whole stretches of the file without making arrays of them, and it took
1.2 times the CPU to read a model of 66 MB. The format is a length, a JSON table and the bytes; a test reads our
files with the library.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fedel import checksum
from fedel.serialisation import parse_json
from fedel.types import Array
from fedel_aggregator.errors import MALFORMED, damaged

_LENGTH_BYTES = 8
_MAX_TABLE_BYTES = 100 << 20
_MAX_AXES = 32
_PIECE_BYTES = 1 << 20
Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Name and shape of each tensor of a file, in order; all are float32."""


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor are in a file."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]


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


def identity(stat: os.stat_result) -> tuple[int, ...]:
    """Tells a file from another that gets its name, and from itself after it was changed."""
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size


def _layout(shapes: Shapes) -> tuple[bytes, dict[str, Place]]:
    """The beginning of a safetensors file, and where each tensor goes after it."""
    table, position = {}, 0
    for name, shape in shapes:
        end = position + 4 * math.prod(shape)
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


def _read_places(handle: int) -> dict[str, Place]:
    """Where the tensors of a file are; ``MALFORMED`` if its table makes no sense."""
    size = os.fstat(handle).st_size
    length = int.from_bytes(os.pread(handle, _LENGTH_BYTES, 0), "little")
    if length > min(size - _LENGTH_BYTES, _MAX_TABLE_BYTES):
        raise ValueError("its table is cut off")
    table = parse_json(os.pread(handle, length, _LENGTH_BYTES))
    table.pop("__metadata__", None)
    places = _places(table, _LENGTH_BYTES + length)
    for name, place in places.items():
        numbers = (place.offset, place.num_bytes, *place.shape)
        if any(type(number) is not int or number < 0 for number in numbers) or len(place.shape) > _MAX_AXES:
            raise ValueError(f"the place of tensor '{name}' makes no sense")
        if place.num_bytes != 4 * math.prod(place.shape) or place.offset + place.num_bytes > size:
            raise ValueError(f"tensor '{name}' is cut off")
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
        return checksum.crc32(data)

    def put_bytes(self, offset: int, *pieces: bytes | memoryview) -> int:
        """Write bytes of the tensors, counted from the first one's beginning; returns how many."""
        return write_all(self._handle, self._start + offset, *pieces)


class TensorFile:
    """A safetensors file, open for reading."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, os.open(path, os.O_RDONLY)
        try:
            self.identity = identity(os.fstat(self._handle))
            self.places = _read_places(self._handle)
        except MALFORMED as error:
            os.close(self._handle)
            raise damaged("version file", path, error) from None
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._handle)

    def tensor(self, name: str, crc32: int) -> Array:
        """A tensor, its checksum verified."""
        place = self.places[name]
        values: Array = np.empty(place.shape, "<f4")
        data = values.reshape(-1).view(np.uint8).data
        view, offset = data, place.offset
        while view:
            count = os.preadv(self._handle, [view], offset)
            if count == 0:
                raise damaged("version file", self._path, f"tensor '{name}' is cut off")
            view, offset = view[count:], offset + count
        self._compare(name, checksum.crc32(data), crc32)
        return values

    def mapped(self, name: str, crc32: int) -> Array:
        """The same as a view of the file: the system may have its pages back at any time."""
        place = self.places[name]
        before = place.offset % mmap.ALLOCATIONGRANULARITY
        size, start = before + place.num_bytes, place.offset - before
        view = memoryview(mmap.mmap(self._handle, size, prot=mmap.PROT_READ, offset=start))[before:]
        self._compare(name, checksum.crc32(view), crc32)
        return np.frombuffer(view, "<f4").reshape(place.shape)

    def verify(self, name: str, crc32: int) -> None:
        """Read a tensor in pieces, and compare its checksum."""
        place, crc = self.places[name], 0
        for start in range(0, place.num_bytes, _PIECE_BYTES):
            piece = self.read(place.offset + start, min(_PIECE_BYTES, place.num_bytes - start))
            crc = checksum.crc32(piece, crc)
        self._compare(name, crc, crc32)

    def _compare(self, name: str, crc: int, expected: int) -> None:
        if crc != expected:
            raise damaged("version file", self._path, f"tensor '{name}' is not what was written")

    def read(self, offset: int, num_bytes: int) -> bytes:
        data = os.pread(self._handle, num_bytes, offset)
        if len(data) < num_bytes:
            raise damaged("version file", self._path, f"it ends before byte {offset + num_bytes}")
        return data
