"""What an agent keeps of one run between rounds and restarts: the newest model, memories, its last update."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from fedel.errors import ServiceError
from fedel.files import TEMPORARY, safe_name, write_atomic
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1 import aggregator_pb2
from fedel.wire.payload import Payload
from fedel_edge import checked_files
from fedel_edge.checked_files import PRIVATE, read_record, write_record
from fedel_edge.memory import DiskMemories, numbered

STAMP = "identity"
"""File that says which run a folder is of."""
COPIES = 6
"""A folder holds at most this many times the size of the model: the model, three memories, two updates."""
_KEPT_UPDATES = 2
"""Where a late update counts in the next round, two rounds can be under way."""


class RunFolder:
    """``<state_dir>/<run>``; what another run of the same name left in it is deleted.

    It holds at most a model, three memories and two updates. Other users cannot look inside.
    """

    def __init__(self, state_dir: Path, run: str, identity: str) -> None:
        self.path = state_dir / safe_name(run)
        stamp = self.path / STAMP
        if not stamp.exists() or stamp.read_bytes() != identity.encode():
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(mode=0o700, parents=True)
            write_atomic(stamp, identity, mode=PRIVATE)
        self.path.chmod(0o700)
        for unfinished in self.path.glob(f".*{TEMPORARY}"):
            unfinished.unlink(missing_ok=True)
        self.memories = DiskMemories(self.path)
        self.model = ModelCopy(self.path / "model")
        self.outbox = Outbox(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class ModelCopy:
    """The newest model this device has seen: only what has changed since then is downloaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, spec: ModelSpec) -> tuple[int, dict[str, Array]]:
        """Version and tensors; -1 and none if there is no complete copy."""
        found = read_record(self._path)
        if found is None:
            return -1, {}
        record, tensors = found
        version, shapes = record.get("version"), {name: values.shape for name, values in tensors.items()}
        if not isinstance(version, int) or shapes != {t.name: t.shape for t in spec.tensors}:
            checked_files.drop(self._path, ValueError("it is of another model"))
            return -1, {}
        return version, tensors

    def save(self, version: int, tensors: Tensors) -> None:
        write_record(self._path, {"version": version}, tensors)


@dataclass(frozen=True)
class StoredUpdate:
    """A finished update in the outbox."""

    header: aggregator_pb2.UpdateHeader
    """Of the whole update; each shard is sent a part."""
    payload: Payload

    def part(self, names: Collection[str]) -> Payload:
        """The tensors of one shard; no names means all."""
        if not names:
            return self.payload
        chosen = [i for i, entry in enumerate(self.payload.manifest) if entry.name in names]
        return Payload(
            tuple(self.payload.manifest[i] for i in chosen), tuple(self.payload.buffers[i] for i in chosen)
        )


class Outbox:
    """The update of one round, kept until the round is closed: a restarted agent sends it instead of training
    again, and it is the same to the bit."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, round_num: int, header: aggregator_pb2.UpdateHeader, payload: Payload) -> StoredUpdate:
        """What is returned is mapped from the file, so that it takes no memory while the upload waits."""
        checked_files.write(self._path(round_num), header.SerializeToString(), payload.buffers)
        for old in numbered(self._folder, "update-")[:-_KEPT_UPDATES]:
            if old != round_num:
                self._path(old).unlink(missing_ok=True)
        stored = self.get(round_num)
        if stored is None:
            raise ServiceError(
                f"{self._path(round_num)} was damaged as it was written: check this device's disk"
            )
        return stored

    def get(self, round_num: int) -> StoredUpdate | None:
        path = self._path(round_num)
        found = checked_files.mapped(path)
        if found is None:
            return None
        head, body = found
        try:
            header = aggregator_pb2.UpdateHeader.FromString(head)
        except DecodeError as error:
            checked_files.drop(path, error)
            return None
        buffers, begin = [], 0
        for entry in header.tensors:
            buffers.append(body[begin : begin + entry.num_bytes])
            begin += entry.num_bytes
        return StoredUpdate(header, Payload(tuple(header.tensors), tuple(buffers)))

    def drop(self, up_to: int) -> None:
        """Delete updates of this round and earlier ones."""
        for round_num in numbered(self._folder, "update-"):
            if round_num <= up_to:
                self._path(round_num).unlink(missing_ok=True)

    def _path(self, round_num: int) -> Path:
        return self._folder / f"update-{round_num}"
