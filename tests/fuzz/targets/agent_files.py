"""The files of an agent: what is damaged is downloaded, trained or taken from the coordinator again."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random

from fedel_edge.run_folder import RunFolder

from fedel import testing
from fedel.types import Memory, Window
from fedel.v1 import aggregator_pb2 as agg
from fedel.wire.payload import pack
from tests.fuzz import samples
from tests.fuzz.mutate import json_case, message_case, mutate_bytes
from tests.fuzz.target import Mutator, Read, Target
from tests.fuzz.targets.aggregator_files import safetensors_case

IDENTITY = "one run"


@cache
def _sound() -> Path:
    state = Path(tempfile.mkdtemp(prefix="fuzz-agent-"))
    folder = RunFolder(state, samples.RUN, IDENTITY)
    folder.model.save(3, testing.initial_model())
    tensors = {"blocks.stem.conv.weight": testing.initial_model()["blocks.stem.conv.weight"]}
    folder.memories.stage(2, Memory(Window(1, 3), ("blocks.stem.conv.weight",), 1, 2, tensors))
    folder.outbox.put(3, samples.update_header(), pack(samples.update().patches))
    return folder.path


def _load_model(folder: RunFolder) -> object:
    return folder.model.load(samples.SPEC)


def _load_memory(folder: RunFolder) -> object:
    return folder.memories.load(2)


def _load_outbox(folder: RunFolder) -> object:
    stored = folder.outbox.get(3)
    return stored and (stored.part(["blocks.stem.conv.weight"]), list(stored.payload.chunks()))


def _target(label: str, name: str, mutate: Mutator, load: Callable[[RunFolder], object]) -> Target:
    def prepare(state: Path) -> Read:
        def read(data: bytes) -> object:
            place = RunFolder(state, samples.RUN, IDENTITY)
            for path in _sound().iterdir():
                (place.path / path.name).write_bytes(data if path.name == name else path.read_bytes())
            return load(RunFolder(state, samples.RUN, IDENTITY))

        return read

    return Target(label, lambda: [(_sound() / name).read_bytes()], mutate, prepare)


def _outbox_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    (length,) = struct.unpack_from("<Q", valid)
    if rng.random() < 0.5:
        return mutate_bytes(rng, valid, others)
    message = message_case(agg.UpdateHeader)(rng, valid[8 : 8 + length], others)
    return struct.pack("<Q", len(message)) + message + valid[8 + length :]


AGENT_FILES = (
    _target("agent_model", "model.safetensors", safetensors_case, _load_model),
    _target("agent_memory", "memory-2.json", json_case, _load_memory),
    _target("agent_memory_tensors", "memory-2.safetensors", safetensors_case, _load_memory),
    _target("agent_update", "update-3", _outbox_case, _load_outbox),
    _target("agent_identity", "identity", mutate_bytes, _load_model),
)
