"""What an agent keeps of one run between rounds and restarts: the newest model, memories, its last update."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from fedel.errors import ServiceError
from fedel.files import TEMPORARY, safe_name, write_atomic
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1 import aggregator_pb2
from fedel.v1.code_pb2 import StoredCode
from fedel.wire.payload import Payload
from fedel_edge import checked_files
from fedel_edge.checked_files import PRIVATE, read_record, write_record
from fedel_edge.memory import DiskMemories, numbered
from fedel_edge.memory_limit import MemoryLimit

STAMP = "identity"
"""File that says which run a folder is of."""
CODE = "code"
"""File with the code that came with the job."""
COPIES = 6
"""A folder holds at most this many times the size of the model: the model, three memories, two updates."""
_KEPT_UPDATES = 2
"""Of a round that is late and still counts, and of the newest one."""


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
        (self.path / "model").unlink(missing_ok=True)  # of an earlier release: all blocks in one file
        self.model = ModelCopy(self.path)
        self.outbox = Outbox(self.path)
        self.memory_limit = MemoryLimit(self.path / "allowed-memory")

    def keep_code(self, code: StoredCode) -> None:
        """What came with the job, for the next start of this agent; it goes with the folder."""
        write_atomic(self.path / CODE, code.SerializeToString(), mode=PRIVATE)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def kept_code(state_dir: Path, run: str, identity: str) -> StoredCode | None:
    """The code of a run that this device took before; ``None`` if there is none, or if it is damaged."""
    folder = state_dir / safe_name(run)
    try:
        if (folder / STAMP).read_bytes() == identity.encode():
            return StoredCode.FromString((folder / CODE).read_bytes())
    except (OSError, DecodeError):
        pass
    return None


class ModelCopy:
    """The newest values that this device has seen of each tensor, with the version they are of.

    ``model-<block>``: a file per block, so that a task reads and writes only the blocks that it needs. They are
    not synced: what a power cut takes is downloaded again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, spec: ModelSpec, names: Iterable[str]) -> tuple[dict[str, int], dict[str, Array]]:
        """Version and values of each tensor that is here, of all blocks with a tensor among ``names``."""
        versions: dict[str, int] = {}
        tensors: dict[str, Array] = {}
        for block in sorted({spec.by_name[name].block for name in names}):
            found = self._read(block, spec)
            versions.update(found[0])
            tensors.update(found[1])
        return versions, tensors

    def save(self, spec: ModelSpec, versions: Mapping[str, int], tensors: Tensors, new: Iterable[str]) -> None:
        """Write the blocks with a tensor among ``new``. A crash leaves a block's old file or its new one: no
        value gets the version of another."""
        for block in sorted({spec.by_name[name].block for name in new}):
            names = [t.name for t in spec.tensors if t.block == block and t.name in tensors]
            record = {"versions": {name: versions[name] for name in names}}
            write_record(self._path(block), record, {name: tensors[name] for name in names}, durable=False)

    def _read(self, block: int, spec: ModelSpec) -> tuple[dict[str, int], dict[str, Array]]:
        found = read_record(self._path(block))
        if found is None:
            return {}, {}
        versions, tensors = found[0].get("versions"), found[1]
        forms = {t.name: (t.shape, t.dtype) for t in spec.tensors if t.block == block}
        if (
            any(forms.get(name) != (values.shape, str(values.dtype)) for name, values in tensors.items())
            or not isinstance(versions, dict)
            or versions.keys() != tensors.keys()
            or not all(type(version) is int and version >= 0 for version in versions.values())
        ):
            checked_files.drop(self._path(block), ValueError("it is of another model"))
            return {}, {}
        return versions, tensors

    def _path(self, block: int) -> Path:
        return self._folder / f"model-{block}"


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
