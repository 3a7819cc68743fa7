"""What an agent keeps of one run between rounds and restarts: the newest model, memories, its last update."""

from __future__ import annotations

import logging
import mmap
import shutil
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedel.files import open_atomic, safe_name, write_atomic
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1 import aggregator_pb2
from fedel.wire.payload import Payload
from fedel_edge.memory import DiskMemories

_log = logging.getLogger(__name__)


class RunFolder:
    """``<state_dir>/<run>``; what another run of the same name left in it is deleted."""

    def __init__(self, state_dir: Path, run: str, identity: str) -> None:
        self.path = state_dir / safe_name(run)
        stamp = self.path / "identity"
        if not stamp.exists() or stamp.read_bytes() != identity.encode():
            shutil.rmtree(self.path, ignore_errors=True)
            write_atomic(stamp, identity)
        self.memories = DiskMemories(self.path)
        self.model = ModelCopy(self.path / "model.safetensors")
        self.outbox = Outbox(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class ModelCopy:
    """The newest model this device has seen: only what has changed since then is downloaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self, spec: ModelSpec) -> tuple[int, dict[str, Array]]:
        """Version and tensors; -1 and none if there is no complete copy."""
        try:
            with safe_open(self._path, framework="numpy") as file:
                version = int(file.metadata()["version"])
                tensors = {t.name: file.get_tensor(t.name) for t in spec.tensors}
        except FileNotFoundError:
            return -1, {}
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            _log.warning("%s is damaged (%s): downloading the whole model", self._path, error)
            return -1, {}
        return version, tensors

    def save(self, version: int, tensors: Tensors) -> None:
        write_atomic(self._path, save(dict(tensors), metadata={"version": str(version)}))


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
        """One file: length of the header, header, payload. What is returned is mapped from it, so that it
        takes no memory while the upload waits."""
        message = header.SerializeToString()
        with open_atomic(self._path(round_num)) as file:
            file.writelines([struct.pack("<Q", len(message)), message, *payload.buffers])
        stored = self.get(round_num)
        assert stored is not None, "it was written just now"
        return stored

    def get(self, round_num: int) -> StoredUpdate | None:
        path = self._path(round_num)
        try:
            with path.open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            (length,) = struct.unpack("<Q", view[:8])
            header = aggregator_pb2.UpdateHeader.FromString(bytes(view[8 : 8 + length]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error, DecodeError) as error:
            _log.warning("%s is damaged (%s): training again", path, error)
            return None
        buffers, begin = [], 8 + length
        for entry in header.tensors:
            buffers.append(view[begin : begin + entry.num_bytes])
            begin += entry.num_bytes
        return StoredUpdate(header, Payload(tuple(header.tensors), tuple(buffers)))

    def drop(self, up_to: int) -> None:
        """Delete updates of this round and earlier ones."""
        for path in self._folder.glob("update-*"):
            if int(path.name.removeprefix("update-")) <= up_to:
                path.unlink(missing_ok=True)

    def _path(self, round_num: int) -> Path:
        return self._folder / f"update-{round_num}"
