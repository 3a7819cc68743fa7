"""The files of an aggregator: one is changed in a run that is otherwise sound, then the run is used."""

from __future__ import annotations

import gc
import shutil
import struct
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random

from fedel_aggregator.first_model import FirstModel
from fedel_aggregator.journal import Part
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import ShardRun
from fedel_aggregator.tensor_file import TensorFile

from fedel.v1 import aggregator_pb2 as agg
from fedel.wire.codec import report_to_pb
from fedel.wire.payload import pack
from tests.fuzz import samples
from tests.fuzz.mutate import json_case, message_case, mutate_bytes
from tests.fuzz.target import Mutator, Read, Target, memory_disk, reads_file

_NUMBERS = struct.Struct("<QQ")


def _upload(run: ShardRun, client: str, *, finish: bool = True) -> None:
    update = samples.whole_update(client, run.version)
    payload = pack(update.patches)
    header = agg.UpdateHeader(
        run=samples.RUN,
        report=report_to_pb(update.report),
        tensors=payload.manifest,
        digest=payload.digest,
    )
    part = _begin(run, header)
    whole = b"".join(payload.buffers)[part.received :]
    part.append([whole if finish else whole[: len(whole) // 2]])
    if finish:
        run.take(part)
    part.close()


def _begin(run: ShardRun, header: agg.UpdateHeader) -> Part:
    upload = run.examine(header)
    assert upload is not None
    part = run.begin(upload, header)
    assert part is not None
    return part


@cache
def sound_run() -> Path:
    """A run in round 1: one update is in, another broke off, and a version has a label."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-run-", dir=memory_disk()))
    model = FirstModel(folder / "run", samples.first_model(), RecycledFiles(folder / "spare"))
    model.append([samples.model_payload()])
    run = model.finish()
    model.close()
    _upload(run, "client-0")
    run.seal(0)
    run.commit(0, ["client-0"])
    run.keep(1, "best")
    _upload(run, "client-0")
    _upload(run, "client-1", finish=False)
    return folder / "run"


def _use(folder: Path) -> object:
    """All that an aggregator does with a run after a restart."""
    run = ShardRun(folder, RecycledFiles(folder.parent / "spare"))
    for version in run.versions.all():
        run.versions.meta(version)
        with run.versions.open(version) as file:
            for tensor in run.spec.tensors:
                file.tensor(tensor.name)
    _upload(run, "client-1")
    answer = run.seal(run.version)
    return run.commit(run.version, [report.client for report in answer.reports])


def _in_run(name: str, mutate: Mutator) -> Target:
    """A target that changes one file of the run."""

    def prepare(folder: Path) -> Read:
        place = folder / "run"

        def read(data: bytes) -> object:
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(sound_run(), place)
            (place / name).write_bytes(data)
            try:
                return _use(place)
            finally:
                gc.collect(0)

        return read

    return Target(
        f"aggregator_{_label(name)}", lambda: [(sound_run() / name).read_bytes()], mutate, prepare, seconds=2.0
    )


def _label(name: str) -> str:
    return {"run.pb": "header", "labels.json": "labels"}.get(name) or {
        ".json": "version_facts",
        ".safetensors": "version",
        ".update": "update",
        ".part": "part",
    }[Path(name).suffix]


def safetensors_case(rng: Random, valid: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Change the table at the beginning, or any byte."""
    (length,) = struct.unpack_from("<Q", valid)
    if rng.random() < 0.5:
        return mutate_bytes(rng, valid, others)
    table = json_case(rng, valid[8 : 8 + length].rstrip())
    if rng.random() < 0.5:
        table = table.ljust(length)
    stated = len(table) if rng.random() < 0.9 else rng.choice((0, 2**31, 2**62, 2**64 - 1))
    return struct.pack("<Q", stated) + table + valid[8 + length :]


def _journal_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    """Change the header by field, or any byte."""
    length, received = _NUMBERS.unpack_from(valid)
    if rng.random() < 0.5:
        return mutate_bytes(rng, valid, others)
    end = _NUMBERS.size + length
    message = message_case(agg.UpdateHeader)(rng, valid[_NUMBERS.size : end], others)
    return _NUMBERS.pack(len(message), received) + message + valid[end:]


def _tensor_file(path: Path) -> object:
    with TensorFile(path) as file:
        return [file.tensor(name) for name in file.places]


_VERSION = "versions/000001.safetensors"
_FILES: dict[str, Callable[..., bytes]] = {
    "run.pb": message_case(agg.ModelHeader),
    "labels.json": json_case,
    "versions/000001.json": json_case,
    _VERSION: safetensors_case,
    "rounds/000001/client-0.update": _journal_case,
    "rounds/000001/client-1.part": _journal_case,
}
AGGREGATOR_FILES = (
    *(_in_run(name, mutate) for name, mutate in _FILES.items()),
    Target(
        "tensor_file",
        lambda: [(sound_run() / _VERSION).read_bytes()],
        safetensors_case,
        reads_file("model.safetensors", _tensor_file),
    ),
)
