"""The updates of one round on disk: what was acknowledged can be folded again, what broke off can be resumed.

A file is three numbers (length and checksum of the header, bytes of the payload that are there), the header
and, from the next page on, the payload. ``<client>.part`` grows while a client sends; renamed to
``<client>.update`` it counts; one that cannot be read is renamed to ``<client>.bad``. After the bytes that are
there may follow others, of an earlier round: files are recycled.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from google.protobuf.message import DecodeError

from fedel import checksum
from fedel.errors import UpdateRefused
from fedel.files import safe_name, sync_directory
from fedel.roles.aggregator import Upload
from fedel.types import PLAIN, ModelSpec, SentUpdate, UploadSettings
from fedel.v1.aggregator_pb2 import OpenRoundRequest, Unmask, UpdateHeader
from fedel.wire import payload
from fedel.wire.codec import report_from_pb
from fedel_aggregator.errors import MALFORMED, Damaged, damaged, damaged_update
from fedel_aggregator.private_files import FILE_MODE, make_folder, naming, open_private, write_private
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.stored_patches import Pages, StoredPatches
from fedel_aggregator.tensor_file import write_all

log = logging.getLogger("fedel.aggregator")
PLAN_FILE = "plan.pb"
UNMASK_FILE = "unmask.pb"
_NUMBER_BYTES = 8
_MESSAGE_START = 2 * _NUMBER_BYTES
_PAGED = 1 << 31
"""Set in a header's length: the payload begins with a page. In files of earlier versions it follows the header
at once, so that every write begins and ends inside a page, and values lie at odd places."""
_PAGE_BYTES = 4096


@dataclass
class Part:
    """An update that is being received. Only one stream at a time writes it."""

    upload: Upload
    """Its manifest has been checked; whether the round takes it was decided with this."""
    header: UpdateHeader
    path: Path
    handle: int
    start: int
    """Where the payload begins in the file."""
    received: int
    """Bytes of the payload that are there: where the client continues."""

    @cached_property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.header.tensors)

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        with naming(self.path):
            self.received += write_all(self.handle, self.start + self.received, *pieces)
            write_all(self.handle, _NUMBER_BYTES, _number(self.received))

    def sync(self) -> None:
        # Not fsync: the time of the last change need not be on disk.
        with naming(self.path):
            os.fdatasync(self.handle)

    def close(self) -> None:
        os.close(self.handle)


class Journal:
    """The folder of one round."""

    def __init__(self, folder: Path, recycled: RecycledFiles) -> None:
        self.folder, self._recycled = folder, recycled
        self._updates: dict[str, Path] = {}
        """Files of the updates that count, by client."""
        make_folder(folder)
        sync_directory(folder.parent)

    @property
    def sealed(self) -> bool:
        return (self.folder / "sealed").exists()

    def seal(self) -> None:
        write_private(self.folder / "sealed", b"")

    @property
    def plan(self) -> OpenRoundRequest | None:
        """Who may send an update of the round; ``None`` until the coordinator says it."""
        path = self.folder / PLAN_FILE
        try:
            return OpenRoundRequest.FromString(path.read_bytes())
        except FileNotFoundError:
            return None
        except DecodeError as error:
            raise damaged("plan of a round", path, f"it cannot be read ({error})") from None

    def open(self, plan: OpenRoundRequest) -> None:
        """Store the plan; a sealed round is open again. At another attempt of secure aggregation, the updates
        of the one before are good for nothing."""
        before = self.plan
        if before is not None and before.attempt != plan.attempt:
            for client in list(self._updates):
                self.forget(client)
        write_private(self.folder / PLAN_FILE, plan.SerializeToString(deterministic=True))
        if self.sealed:
            (self.folder / "sealed").unlink()
            sync_directory(self.folder)

    def keep_secrets(self, unmask: Unmask) -> None:
        """What takes the masks off the round's sum: without it nobody could compute the sum again."""
        write_private(self.folder / UNMASK_FILE, unmask.SerializeToString(deterministic=True))

    def _path(self, client: str, suffix: str) -> Path:
        return self.folder / f"{safe_name(client)}.{suffix}"

    def begin(self, upload: Upload, header: UpdateHeader) -> Part:
        """Start an update, or resume it where the same one broke off."""
        path = self._path(upload.client, "part")
        if not path.exists():
            self._recycled.take(path)
        message = header.SerializeToString(deterministic=True)
        part = Part(upload, header, path, open_private(path), _paged_start(message), 0)
        try:
            with naming(path):
                part.received = _resume(part, message)
        except BaseException:
            part.close()
            raise
        return part

    def commit(self, part: Part) -> None:
        """From here on the update counts, whatever happens. Its bytes must be on disk already."""
        client = part.upload.client
        unfinished, path = self._path(client, "part"), self._path(client, "update")
        unfinished.rename(path)
        try:
            sync_directory(self.folder)
        except OSError:
            # It does not count, so it must not after a restart. The client can resume it: all bytes are there.
            with suppress(OSError):
                path.rename(unfinished)
            raise
        self._updates[client] = path

    def forget(self, client: str) -> None:
        """Delete an update that no longer counts."""
        self._updates.pop(client).unlink()

    def drop(self, client: str) -> None:
        """Delete what a client sent so far."""
        self._path(client, "part").unlink(missing_ok=True)

    def drop_parts(self) -> None:
        """Delete all updates that are not finished."""
        for path in self.folder.glob("*.part"):
            path.unlink()

    def load(self) -> list[UpdateHeader]:
        """Find the updates that count; returns their headers, in a fixed order.

        One that cannot be read counts as not sent, unless the round is sealed: then it has been reported.
        """
        headers = []
        for path in sorted(self.folder.glob("*.update")):
            try:
                header, _ = open_update(path)
                if header.report.client in self._updates:
                    raise damaged_update(path, "there is another of the same client")
            except Damaged as error:
                self._give_up(path, error)
                continue
            self._updates[header.report.client] = path
            headers.append(header)
        return headers

    def give_up(self, client: str, error: Damaged) -> None:
        """Let an update that cannot be read count as not sent; raises the error if the round is sealed."""
        self._give_up(self._updates[client], error)
        del self._updates[client]

    def path(self, client: str) -> Path:
        """The file of an update that counts."""
        return self._updates[client]

    def _give_up(self, path: Path, error: Damaged) -> None:
        if self.sealed:
            raise error
        path.rename(path.with_suffix(".bad"))
        log.error("an update counts as not sent: %s", error)

    def read(self, client: str, spec: ModelSpec, upload: UploadSettings = PLAIN) -> SentUpdate:
        """An update that counts."""
        path = self._updates[client]
        header, start = open_update(path)
        with path.open("rb") as file, naming(path):
            try:
                payload.check(header.tensors, spec, upload)
                return read_update(file.fileno(), header, start, spec)
            except (UpdateRefused, *MALFORMED) as error:
                raise damaged_update(path, error) from None

    def hand_on(self, successor: Journal, oldest: int, counted: Collection[str] | None) -> None:
        """Let the next round have what is of round ``oldest`` or a later one: updates that are not finished,
        and those of clients that are not ``counted``, if that is known."""
        paths = list(self.folder.glob("*.part"))
        if counted is not None:
            names = {self._path(client, "update").name for client in counted}
            paths += [path for path in self.folder.glob("*.update") if path.name not in names]
        moved = [path for path in paths if _round_of(path) >= oldest]
        for path in moved:
            path.rename(successor.folder / path.name)
        if moved:
            # What was acknowledged is there before the folder that it comes from is gone.
            sync_directory(successor.folder)

    def retire(self) -> None:
        """End the round."""
        self._recycled.give(self.folder.glob("*.update"))
        shutil.rmtree(self.folder)


def read_update(handle: int, header: UpdateHeader, start: int, spec: ModelSpec) -> SentUpdate:
    """The update in a file, every checksum verified; its values are views of the file, not copies."""
    patches, pages, offset = {}, Pages(handle), start
    for entry in header.tensors:
        data = pages.use(offset, entry.num_bytes)
        patches[entry.name] = payload.unpack(entry, data, spec.by_name[entry.name].shape)
        offset += entry.num_bytes
    sizes = {entry.name: entry.num_bytes for entry in header.tensors}
    return SentUpdate(StoredPatches(patches, sizes, pages), report_from_pb(header.report))


def _resume(part: Part, message: bytes) -> int:
    """Bytes of the payload that a file has; one of another update is made ready for this one."""
    handle, size = part.handle, os.fstat(part.handle).st_size
    found, start = _read_message(handle)
    if found == message:
        part.start = start
        received = int.from_bytes(os.pread(handle, _NUMBER_BYTES, _NUMBER_BYTES), "little")
        return max(0, min(received, size - part.start, part.num_bytes))
    os.fchmod(handle, FILE_MODE)
    os.ftruncate(handle, max(part.start, min(size, part.start + part.num_bytes)))
    write_all(handle, 0, _number(len(message) | _PAGED | checksum.crc32(message) << 32), _number(0), message)
    return 0


def open_update(path: Path) -> tuple[UpdateHeader, int]:
    """The header of an update that counts, and where its payload begins."""
    with path.open("rb") as file, naming(path):
        message, start = _read_message(file.fileno())
    try:
        header = UpdateHeader.FromString(message or b"")
    except DecodeError:
        message = None
    if message is None or not header.report.client:
        raise damaged_update(path, "its header cannot be read")
    return header, start


def _round_of(path: Path) -> int:
    """The round that an update is of; -1 if it cannot be read."""
    try:
        return open_update(path)[0].report.round_num
    except Damaged:
        return -1


def _number(value: int) -> bytes:
    return value.to_bytes(_NUMBER_BYTES, "little")


def _paged_start(message: bytes) -> int:
    return -(-(_MESSAGE_START + len(message)) // _PAGE_BYTES) * _PAGE_BYTES


def _read_message(handle: int) -> tuple[bytes | None, int]:
    """The header of a file as bytes, ``None`` if it is cut off or not what was written; and where the payload
    begins."""
    number = int.from_bytes(os.pread(handle, _NUMBER_BYTES, 0), "little")
    length, crc32 = number & (_PAGED - 1), number >> 32
    if length > os.fstat(handle).st_size - _MESSAGE_START:
        return None, 0
    message = os.pread(handle, length, _MESSAGE_START)
    start = _paged_start(message) if number & _PAGED else _MESSAGE_START + length
    # Files of earlier versions have no checksum.
    return message if crc32 in (0, checksum.crc32(message)) else None, start
