"""The files of an aggregator: one is changed in a run that is otherwise sound, then the run is used."""

from __future__ import annotations

import gc
import json
import shutil
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

from fedel_aggregator.errors import Damaged
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
from tests.fuzz.target import Mutator, Read, Target, reads_file, scratch

_NUMBERS = struct.Struct("<IIQ")
"""Length and checksum of the header, bytes of the payload that are there."""


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


def _plan(run: ShardRun) -> None:
    clients = [
        agg.Participant(
            client=client, round_num=run.version, num_samples=40, max_steps=100, max_effective_steps=100.0
        )
        for client in samples.CLIENTS
    ]
    run.open(agg.OpenRoundRequest(run=samples.RUN, round_num=run.version, participants=clients))


def _begin(run: ShardRun, header: agg.UpdateHeader) -> Part:
    upload = run.examine(header)
    assert upload is not None
    part = run.begin(upload, header)
    assert part is not None
    return part


@cache
def sound_run() -> Path:
    """A run in round 1: one update is in, another broke off, and a version has a label."""
    folder = scratch()
    header = samples.first_model()
    header.strategy_json = json.dumps(_STRATEGY)
    model = FirstModel(folder / samples.RUN, header, RecycledFiles(folder / "spare"), keep_updates=-1)
    model.append([samples.model_payload()])
    run = model.finish()
    model.close()
    _plan(run)
    _upload(run, "client-0")
    run.seal(0)
    run.commit(0, ["client-0"])
    run.keep(1, "best")
    _plan(run)
    _upload(run, "client-0")
    _upload(run, "client-1", finish=False)
    return folder / samples.RUN


def _use(folder: Path) -> object:
    """All that an aggregator does with a run after a restart."""
    run = ShardRun(folder, RecycledFiles(folder.parent / "spare"), keep_updates=-1, verify=True)
    for version in run.versions.all():
        meta = run.versions.meta(version)
        run.versions.read_state(meta)
        with run.versions.open(version) as file:
            for tensor in run.spec.tensors:
                file.tensor(tensor.name, meta.crc32[tensor.name])
    run.seal(run.version - 1)
    run.commit(run.version - 1, [])
    _plan(run)
    _upload(run, "client-1")
    answer = run.seal(run.version)
    return run.commit(run.version, [report.client for report in answer.reports])


def _in_run(label: str, name: str, mutate: Mutator) -> Target:
    """A target that changes one file of the run."""

    def prepare(folder: Path) -> Read:
        place = folder / samples.RUN

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
        f"aggregator_{label}", lambda: [(sound_run() / name).read_bytes()], mutate, prepare, seconds=2.0
    )


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
    length, _, received = _NUMBERS.unpack_from(valid)
    if rng.random() < 0.5:
        return mutate_bytes(rng, valid, others)
    end = _NUMBERS.size + length
    message = message_case(agg.UpdateHeader)(rng, valid[_NUMBERS.size : end], others)
    crc32 = zlib.crc32(message) if rng.random() < 0.9 else rng.choice((0, 1))
    return _NUMBERS.pack(len(message), crc32, received) + message + valid[end:]


def _tensor_file(path: Path) -> object:
    with TensorFile(path) as file:
        for name in file.places:
            with suppress(Damaged):  # of course the checksum is wrong
                file.tensor(name, 0)
        return file.places


_STRATEGY = {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 3}
"""It has tensors of its own beside the model."""
_VERSION = "versions/000001.safetensors"
_FILES: Mapping[str, tuple[str, Mutator]] = {
    "header": ("run.pb", message_case(agg.ModelHeader)),
    "labels": ("labels.json", json_case),
    "version_facts": ("versions/000001.json", json_case),
    "version": (_VERSION, safetensors_case),
    "state": ("versions/000001.state.safetensors", safetensors_case),
    "sealed": ("versions/000001.sealed.pb", message_case(agg.SealRoundResponse)),
    "plan": ("rounds/000001/plan.pb", message_case(agg.OpenRoundRequest)),
    "update": ("rounds/000001/client-0.update", _journal_case),
    "part": ("rounds/000001/client-1.part", _journal_case),
}
AGGREGATOR_FILES = (
    *(_in_run(label, name, mutate) for label, (name, mutate) in _FILES.items()),
    Target(
        "tensor_file",
        lambda: [(sound_run() / _VERSION).read_bytes()],
        safetensors_case,
        reads_file("model.safetensors", _tensor_file),
    ),
)
