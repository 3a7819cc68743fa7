"""Versions of a model on disk: safetensors files, written and read tensor by tensor; none is in memory."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from fedel.errors import ServiceError, UpdateRefused
from fedel.types import Array, Tensors
from fedel_aggregator.files import TEMPORARY, replacing, write_all, write_file

_LENGTH_BYTES = 8
Shapes = Sequence[tuple[str, tuple[int, ...]]]
"""Name and shape of each tensor of a file, in order; all are float32."""


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes are in a file."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]


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
        self._handle = handle
        self.start = len(beginning)
        write_all(handle, 0, beginning)

    def put(self, name: str, values: Array) -> int:
        """Write one tensor; returns its checksum."""
        data = np.ascontiguousarray(values, "<f4").reshape(-1).view(np.uint8).data
        write_all(self._handle, self.places[name].offset, data)
        return zlib.crc32(data)

    def put_bytes(self, offset: int, *pieces: bytes | memoryview) -> int:
        """Write bytes of the tensors, counted from the first one's beginning; returns how many."""
        return write_all(self._handle, self.start + offset, *pieces)


class TensorFile:
    """A safetensors file, open for reading."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDONLY)
        length = int.from_bytes(os.pread(self._handle, _LENGTH_BYTES, 0), "little")
        table = json.loads(os.pread(self._handle, length, _LENGTH_BYTES))
        table.pop("__metadata__", None)
        self.places = _places(table, _LENGTH_BYTES + length)

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
                raise ServiceError(f"tensor '{name}' of a model file breaks off; restore it from a copy")
            view, offset = view[count:], offset + count
        return values

    def read(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self._handle, num_bytes, offset)


@dataclass(frozen=True)
class Meta:
    """What is known of a version. A version is there once this is."""

    version: int
    crc32: dict[str, int]
    changed: dict[str, int]
    """The version in which each tensor got the bits it has."""
    counted: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Clients in the round that made it, with the round and digest of their updates."""
    sealed: dict[str, Any] = field(default_factory=dict)
    """The answer to SealRound of the round that made it."""
    committed: dict[str, Any] = field(default_factory=dict)
    """The answer to CommitRound."""


class Versions:
    """The versions of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def all(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("*.json"))

    def path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.safetensors"

    def _meta_path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.json"

    def _state_path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.state.safetensors"

    def meta(self, version: int) -> Meta:
        try:
            table = json.loads(self._meta_path(version).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise self._missing(version) from None
        table["counted"] = {client: tuple(entry) for client, entry in table["counted"].items()}
        return Meta(**table)

    def open(self, version: int) -> TensorFile:
        try:
            return TensorFile(self.path(version))
        except FileNotFoundError:
            raise self._missing(version) from None

    def _missing(self, version: int) -> UpdateRefused:
        kept = ", ".join(map(str, self.all())) or "none"
        return UpdateRefused("unknown_version", f"version {version} is not kept here; there are: {kept}")

    @contextmanager
    def writing(self, version: int, shapes: Shapes) -> Iterator[TensorWriter]:
        """The tensors of a new version; it is there only once ``publish`` was called."""
        with replacing(self.path(version)) as handle:
            yield TensorWriter(handle, shapes)

    def write_state(self, version: int, state: Tensors) -> None:
        """The strategy's own tensors; nothing is written where it has none."""
        if not state:
            return
        names = sorted(state)
        with replacing(self._state_path(version)) as handle:
            writer = TensorWriter(handle, [(name, state[name].shape) for name in names])
            for name in names:
                writer.put(name, state[name])

    def read_state(self, version: int) -> dict[str, Array]:
        if not self._state_path(version).exists():
            return {}
        with TensorFile(self._state_path(version)) as file:
            return {name: file.tensor(name) for name in file.places}

    def publish(self, meta: Meta) -> None:
        """Make a version whose tensors are written count."""
        write_file(self._meta_path(meta.version), json.dumps(asdict(meta)).encode())

    def delete(self, version: int) -> None:
        # The meta file first: a version without its tensors must never seem to be there.
        for path in (self._meta_path(version), self._state_path(version), self.path(version)):
            with suppress(FileNotFoundError):
                path.unlink()

    def clean(self) -> None:
        """Remove what a crash left half done."""
        kept = {f"{version:06d}" for version in self.all()}
        for path in self._folder.iterdir():
            if path.name.endswith(TEMPORARY) or path.name.split(".")[0] not in kept:
                path.unlink()
