"""The files of an agent: what is damaged is downloaded, trained or taken from the coordinator again."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

from fedel_edge import checked_files
from fedel_edge.memory_limit import lower, within_memory
from fedel_edge.run_folder import RunFolder

from fedel import testing
from fedel.core.memory_budget import fits, whole_bytes
from fedel.types import Memory, Window
from fedel.v1 import aggregator_pb2 as agg
from fedel.wire import codec
from fedel.wire.payload import pack
from tests.fuzz import samples
from tests.fuzz.mutate import json_case, message_case, mutate_bytes
from tests.fuzz.target import Mutator, Read, Target, scratch

IDENTITY = "one run"
VERSION = 3
"""Of the model that is kept."""


@cache
def _sound() -> Path:
    folder = RunFolder(scratch(), samples.RUN, IDENTITY)
    model = testing.initial_model()
    folder.model.save(samples.SPEC, dict.fromkeys(model, VERSION), model, model)
    tensors = {"blocks.stem.conv.weight": testing.initial_model()["blocks.stem.conv.weight"]}
    folder.memories.stage(2, Memory(Window(1, 3), ("blocks.stem.conv.weight",), 1, 2, tensors))
    folder.outbox.put(3, samples.update_header(), pack(samples.update().patches))
    folder.memory_limit.keep(whole_bytes(samples.SPEC, testing.memory_use()))
    return folder.path


def _load_model(folder: RunFolder) -> object:
    """What is kept is asked for by its versions, and kept again."""
    versions, tensors = folder.model.load(samples.SPEC, samples.SPEC.by_name)
    assert all(values.dtype == samples.SPEC.by_name[name].dtype for name, values in tensors.items())
    older = [have for have in versions.values() if have <= VERSION]
    folder.model.save(samples.SPEC, versions, tensors, tensors)
    return agg.GetModelRequest(version=VERSION, have_versions=older)


def _load_memory(folder: RunFolder) -> object:
    return folder.memories.load(2)


def _load_memory_limit(folder: RunFolder) -> object:
    """The next task keeps within it, and it can be lowered further."""
    profile = replace(testing.profile(), memory=testing.memory_use())
    trainer = testing.FakeTrainer(data_seed=1, num_samples=10, profile=profile)
    task = within_memory(codec.task_from_pb(samples.task_message(), samples.SPEC), trainer, folder.memory_limit)
    return lower(task.memory_bytes, trainer), fits(samples.SPEC, profile, Window(1, 2), task.memory_bytes)


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


def _checked_case(change_head: Mutator) -> Mutator:
    """Change any byte, or the head and usually its checksum too, as another version of FedEL may write it."""
    end = checked_files._END

    def mutated(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
        if rng.random() < 0.3:
            return mutate_bytes(rng, valid, others)
        length, size, crc, mark = end.unpack(valid[-end.size :])
        head, body = valid[:length], valid[length : length + size]
        if rng.random() < 0.8:
            head = change_head(rng, head, others)
        if rng.random() < 0.3:
            body = mutate_bytes(rng, body, others)
        if rng.random() < 0.9:
            lengths = checked_files._LENGTHS.pack(len(head), len(body))
            crc = zlib.crc32(lengths, zlib.crc32(body, zlib.crc32(head)))
        return head + body + end.pack(len(head), len(body), crc, mark)

    return mutated


AGENT_FILES = (
    _target("agent_model", "model-1", _checked_case(json_case), _load_model),
    _target("agent_memory", "memory-2", _checked_case(json_case), _load_memory),
    _target("agent_update", "update-3", _checked_case(message_case(agg.UpdateHeader)), _load_outbox),
    _target("agent_memory_limit", "allowed-memory", _checked_case(json_case), _load_memory_limit),
    _target("agent_identity", "identity", mutate_bytes, _load_model),
)
