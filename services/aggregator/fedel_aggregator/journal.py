"""The updates of one round on disk: what was acknowledged can be folded again, what broke off can be resumed.

A file is two numbers (length of the header, bytes of the payload that are there), the header and the payload.
``<client>.part`` grows while a client sends; renamed to ``<client>.update`` it counts. After the bytes that are
there may follow others, of an earlier round: files are recycled.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from fedel.errors import ServiceError, UpdateRefused
from fedel.files import safe_name, sync_directory, write_atomic
from fedel.roles.aggregator import Upload
from fedel.types import ModelSpec, Update
from fedel.v1.aggregator_pb2 import OpenRoundRequest, UpdateHeader
from fedel.wire import payload
from fedel.wire.codec import report_from_pb
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.tensor_file import closed_on_error, write_all

PLAN_FILE = "plan.pb"
_NUMBER_BYTES = 8
_MESSAGE_START = 2 * _NUMBER_BYTES


@dataclass
class Part:
    """An update that is being received. Only one stream at a time writes it."""

    upload: Upload
    """Its manifest has been checked; whether the round takes it was decided with this."""
    header: UpdateHeader
    handle: int
    start: int
    """Where the payload begins in the file."""
    received: int
    """Bytes of the payload that are there: where the client continues."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.header.tensors)

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.received += write_all(self.handle, self.start + self.received, *pieces)
        write_all(self.handle, _NUMBER_BYTES, _number(self.received))

    def sync(self) -> None:
        os.fsync(self.handle)

    def close(self) -> None:
        os.close(self.handle)


class Journal:
    """The folder of one round."""

    def __init__(self, folder: Path, recycled: RecycledFiles) -> None:
        self.folder, self._recycled = folder, recycled
        self._updates: dict[str, Path] = {}
        """Files of the updates that count, by client."""
        folder.mkdir(parents=True, exist_ok=True)
        sync_directory(folder.parent)

    @property
    def sealed(self) -> bool:
        return (self.folder / "sealed").exists()

    def seal(self) -> None:
        write_atomic(self.folder / "sealed", b"")

    @property
    def plan(self) -> OpenRoundRequest | None:
        """Who may send an update of the round; ``None`` until the coordinator says it."""
        path = self.folder / PLAN_FILE
        return OpenRoundRequest.FromString(path.read_bytes()) if path.exists() else None

    def open(self, plan: OpenRoundRequest) -> None:
        """Store the plan; a sealed round is open again."""
        write_atomic(self.folder / PLAN_FILE, plan.SerializeToString(deterministic=True))
        if self.sealed:
            (self.folder / "sealed").unlink()
            sync_directory(self.folder)

    def _path(self, client: str, suffix: str) -> Path:
        return self.folder / f"{safe_name(client)}.{suffix}"

    def begin(self, upload: Upload, header: UpdateHeader) -> Part:
        """Start an update, or resume it where the same one broke off."""
        path = self._path(upload.client, "part")
        if not path.exists():
            self._recycled.take(path)
        message = header.SerializeToString(deterministic=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        part = Part(upload, header, handle, _MESSAGE_START + len(message), 0)
        with closed_on_error(handle):
            size = os.fstat(handle).st_size
            if _read_message(handle) == message:
                received = int.from_bytes(os.pread(handle, _NUMBER_BYTES, _NUMBER_BYTES), "little")
                part.received = min(received, size - part.start, part.num_bytes)
            else:
                os.ftruncate(handle, min(size, part.start + part.num_bytes))
                write_all(handle, 0, _number(len(message)), _number(0), message)
        return part

    def commit(self, part: Part) -> None:
        """From here on the update counts, whatever happens. Its bytes must be on disk already."""
        client = part.upload.client
        path = self._path(client, "update")
        self._path(client, "part").rename(path)
        sync_directory(self.folder)
        self._updates[client] = path

    def drop(self, client: str) -> None:
        """Delete what a client sent so far."""
        self._path(client, "part").unlink(missing_ok=True)

    def load(self) -> list[UpdateHeader]:
        """Find the updates that count; returns their headers, in a fixed order."""
        headers = []
        for path in sorted(self.folder.glob("*.update")):
            header, _ = open_update(path)
            self._updates[header.report.client] = path
            headers.append(header)
        return headers

    def read(self, client: str, spec: ModelSpec) -> Update:
        """An update that counts."""
        path = self._updates[client]
        header, start = open_update(path)
        with path.open("rb") as file:
            try:
                return read_update(file.fileno(), header, start, spec)
            except UpdateRefused:
                raise _damaged(path) from None

    def hand_on(self, successor: Journal) -> None:
        """Let unfinished updates go on in the next round."""
        for path in self.folder.glob("*.part"):
            path.rename(successor.folder / path.name)

    def retire(self, successor: Journal | None) -> None:
        """End the round: its files are used again. Unfinished updates move to ``successor``, if any."""
        if successor is not None:
            self.hand_on(successor)
        self._recycled.give(self.folder.glob("*.update"))
        shutil.rmtree(self.folder)


def read_update(handle: int, header: UpdateHeader, start: int, spec: ModelSpec) -> Update:
    """The update in a file, every checksum verified; its values are views of the file, not copies."""
    patches, offset = {}, start
    view = memoryview(mmap.mmap(handle, 0, prot=mmap.PROT_READ))
    for entry in header.tensors:
        data = view[offset : offset + entry.num_bytes]
        patches[entry.name] = payload.unpack(entry, data, spec.by_name[entry.name].shape)
        offset += entry.num_bytes
    return Update(patches, report_from_pb(header.report))


def open_update(path: Path) -> tuple[UpdateHeader, int]:
    """The header of an update that counts, and where its payload begins."""
    with path.open("rb") as file:
        message = _read_message(file.fileno())
    try:
        return UpdateHeader.FromString(message), _MESSAGE_START + len(message)
    except DecodeError:
        raise _damaged(path) from None


def _damaged(path: Path) -> ServiceError:
    return ServiceError(f"{path}: the update is damaged; delete it to continue without this client")


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "little")


def _read_message(handle: int) -> bytes:
    """The header of a file as bytes; empty if it is not complete."""
    length = int.from_bytes(os.pread(handle, _NUMBER_BYTES, 0), "little")
    if length > os.fstat(handle).st_size - _MESSAGE_START:
        return b""
    return os.pread(handle, length, _MESSAGE_START)
