from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from fedel_edge import run_folder
from fedel_edge.checked_files import write, write_record
from fedel_edge.memory import DiskMemories
from fedel_edge.run_folder import ModelCopy, Outbox, RunFolder

from fedel.types import Memory, Patch, Tensors, Window
from fedel.v1 import aggregator_pb2
from fedel.wire.payload import pack, unpack
from tests.strategies.fakes import initial_model, same_bits, spec

SPEC = spec()
MEMORY = Memory(Window(2, 4), ("a", "b"), resets=3, rounds_held=1)


def test_memory_round_trip(tmp_path: Path) -> None:
    tensors = {"h": np.arange(6, dtype=np.float32).reshape(2, 3)}
    DiskMemories(tmp_path).stage(7, Memory(None, ("a",), tensors=tensors))
    DiskMemories(tmp_path).stage(8, MEMORY)
    seven = DiskMemories(tmp_path).load(7)
    assert seven is not None
    assert same_bits(tensors, seven.tensors)
    assert (None, ("a",)) == (seven.window, seven.selected)
    assert MEMORY == DiskMemories(tmp_path).load(8)
    assert DiskMemories(tmp_path).load(6) is None


def test_memory_and_outbox_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rename is on disk only once its directory is synced."""
    synced: list[bool] = []
    fsync = os.fsync

    def note(handle: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(handle).st_mode))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    DiskMemories(tmp_path).stage(8, MEMORY)
    Outbox(tmp_path).put(8, aggregator_pb2.UpdateHeader(run="r"), pack({}))
    assert [False, True] * 2 == synced


def test_three_memories_are_kept(tmp_path: Path) -> None:
    memories = DiskMemories(tmp_path)
    for round_num in range(4):
        memories.stage(round_num, MEMORY)
    assert memories.load(1) == MEMORY
    for round_num in range(4, 9):
        memories.stage(round_num, MEMORY)
    assert {1, 7, 8} == {n for n in range(9) if (tmp_path / f"memory-{n}").exists()}


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"window": [1]}', "null"])
def test_damaged_memory_counts_as_none(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "memory-2").write_text(content)
    with caplog.at_level(logging.WARNING):
        assert DiskMemories(tmp_path).load(2) is None
    assert "memory-2 is damaged" in caplog.text
    assert [] == list(tmp_path.iterdir())


def test_memory_of_another_version_counts_as_none(tmp_path: Path) -> None:
    write_record(tmp_path / "memory-2", {"window": [1]}, {})
    assert DiskMemories(tmp_path).load(2) is None
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "head", [b"[" * 100_000, b"{}", b'{"tensors": [["a", "f9", [1]]], "record": {}}', b"7"]
)
def test_a_head_of_another_version_counts_as_none(tmp_path: Path, head: bytes) -> None:
    write(tmp_path / "model-1", head, [bytes(8)])
    assert ({}, {}) == ModelCopy(tmp_path).load(SPEC, SPEC.by_name)
    assert not (tmp_path / "model-1").exists()


def test_model_round_trip(tmp_path: Path) -> None:
    copy, model = ModelCopy(tmp_path), initial_model()
    assert ({}, {}) == copy.load(SPEC, SPEC.by_name)
    some = dict(list(model.items())[2:7])
    for kept in (some, model):
        saved = {name: 12 + place % 3 for place, name in enumerate(kept)}
        copy.save(SPEC, saved, kept, kept)
        versions, tensors = copy.load(SPEC, SPEC.by_name)
        assert saved == versions
        assert same_bits(kept, tensors)


def test_only_blocks_that_are_needed_are_read_and_written(tmp_path: Path) -> None:
    copy, model = ModelCopy(tmp_path), initial_model()
    save_all(tmp_path, 3)
    (tmp_path / "model-5").write_bytes(b"damaged")
    shallow = {t.name for t in SPEC.tensors if t.block <= 2}
    versions, tensors = copy.load(SPEC, {t.name for t in SPEC.weights_in(1, 2)})
    assert dict.fromkeys(shallow, 3) == versions
    assert shallow == tensors.keys()
    copy.save(SPEC, {**versions, NAME: 4}, {**tensors, NAME: model[NAME] + 1}, [NAME])
    assert b"damaged" == (tmp_path / "model-5").read_bytes()
    versions, tensors = copy.load(SPEC, SPEC.by_name)
    assert {t.name: 4 if t.name == NAME else 3 for t in SPEC.tensors if t.block != 5} == versions
    assert same_bits({NAME: model[NAME] + 1}, {NAME: tensors[NAME]})


def test_a_crash_between_two_blocks_keeps_values_and_versions_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_at_the_third(path: Path, *rest: object, **options: object) -> None:
        if path.name == "model-3":
            raise KeyboardInterrupt
        write_record(path, *rest, **options)  # type: ignore[arg-type]

    save_all(tmp_path, 3)
    monkeypatch.setattr(run_folder, "write_record", fail_at_the_third)
    newer = {name: values + 1 for name, values in initial_model().items()}
    with pytest.raises(KeyboardInterrupt):
        ModelCopy(tmp_path).save(SPEC, dict.fromkeys(newer, 4), newer, newer)
    versions, tensors = ModelCopy(tmp_path).load(SPEC, SPEC.by_name)
    assert {t.name: 4 if t.block < 3 else 3 for t in SPEC.tensors} == versions
    older = initial_model()
    assert same_bits({n: (newer if v == 4 else older)[n] for n, v in versions.items()}, tensors)


def test_model_of_an_earlier_release_is_deleted(tmp_path: Path) -> None:
    path = RunFolder(tmp_path, "r", "first").path / "model"
    write_record(path, {"version": 12}, initial_model())
    folder = RunFolder(tmp_path, "r", "first")
    assert ({}, {}) == folder.model.load(SPEC, SPEC.by_name)
    assert not path.exists()


def save_all(folder: Path, version: int) -> None:
    ModelCopy(folder).save(SPEC, dict.fromkeys(SPEC.by_name, version), initial_model(), SPEC.by_name)


NAME, LAST = SPEC.tensors[0].name, SPEC.tensors[-1].name
FIRST = {NAME: initial_model()[NAME]}


@pytest.mark.parametrize(
    ("record", "tensors"),
    [
        ({}, FIRST),
        ({"version": "12"}, FIRST),
        ({"versions": 12}, FIRST),
        ({"versions": {}}, FIRST),
        ({"versions": {NAME: 12, "other": 12}}, FIRST),
        ({"versions": {NAME: None}}, FIRST),
        ({"versions": {NAME: True}}, FIRST),
        ({"versions": {NAME: -(2**40)}}, FIRST),
        ({"versions": {NAME: 12}}, {NAME: FIRST[NAME].astype(np.float16)}),
        ({"versions": {"other": 12}}, {"other": FIRST[NAME]}),
        ({"versions": {NAME: 12}}, {NAME: FIRST[NAME][:1]}),
        (
            {"versions": {SPEC.tensors[-1].name: 12}},
            {SPEC.tensors[-1].name: initial_model()[SPEC.tensors[-1].name]},
        ),
    ],
    ids=str,
)
def test_model_without_a_version_for_each_tensor_counts_as_none(
    tmp_path: Path, record: dict[str, object], tensors: Tensors
) -> None:
    write_record(tmp_path / "model-1", record, tensors)
    assert ({}, {}) == ModelCopy(tmp_path).load(SPEC, SPEC.by_name)
    assert not (tmp_path / "model-1").exists()


def test_damaged_model_is_downloaded_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The block that is damaged; the others are still there."""
    save_all(tmp_path, 12)
    path = tmp_path / "model-3"
    path.write_bytes(path.read_bytes()[:-5])
    versions, _ = ModelCopy(tmp_path).load(SPEC, SPEC.by_name)
    assert {t.name for t in SPEC.tensors if t.block != 3} == versions.keys()
    assert "model-3 is damaged" in caplog.text


def test_update_round_trip_to_the_bit(tmp_path: Path) -> None:
    mask = np.zeros((3, 5), bool)
    mask[1, 2:] = True
    patches = {
        "whole": Patch(np.arange(4, dtype=np.float32)),
        "slices": Patch(np.ones((2, 2), np.float32), (slice(0, 2), slice(0, 2))),
        "bits": Patch(np.arange(3, dtype=np.float32), mask),
    }
    shapes = {"whole": (4,), "slices": (3, 3), "bits": (3, 5)}
    payload = pack(patches)
    header = aggregator_pb2.UpdateHeader(run="r", tensors=payload.manifest, digest=payload.digest)
    Outbox(tmp_path).put(5, header, payload)
    parcel = Outbox(tmp_path).get(5)
    assert parcel is not None
    assert header == parcel.header
    part = parcel.part({"bits", "whole"})
    assert ["whole", "bits"] == [entry.name for entry in part.manifest]
    back = [unpack(e, b, shapes[e.name]) for e, b in zip(part.manifest, part.buffers, strict=True)]
    assert [patches[e.name].values.tolist() for e in part.manifest] == [p.values.tolist() for p in back]
    assert pack(patches).digest == parcel.payload.digest


def test_updates_of_closed_rounds_are_deleted(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for round_num in (3, 4):
        outbox.put(round_num, aggregator_pb2.UpdateHeader(run="r"), pack({}))
    outbox.drop(up_to=3)
    assert outbox.get(3) is None
    assert outbox.get(4) is not None


def test_damaged_update_counts_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "update-3").write_bytes(b"\x07")
    assert Outbox(tmp_path).get(3) is None
    assert "is damaged" in caplog.text


def content_of(folder: Path, name: str) -> object:
    """What an agent would read back."""
    if name == "model-2":
        versions, tensors = ModelCopy(folder).load(SPEC, {t.name for t in SPEC.tensors if t.block == 2})
        return versions, pack_of(tensors)
    if name == "update-3":
        update = Outbox(folder).get(3)
        return update and (update.header.SerializeToString(), [bytes(part) for part in update.payload.buffers])
    memory = DiskMemories(folder).load(3)
    return memory and (memory.window, memory.selected, memory.resets, pack_of(memory.tensors))


def pack_of(tensors: Tensors) -> list[tuple[str, bytes]]:
    return [(name, values.tobytes()) for name, values in tensors.items()]


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
@pytest.mark.parametrize("name", ["memory-3", "model-2", "update-3"])
def test_no_damage_goes_unnoticed(tmp_path: Path, damage: str, name: str) -> None:
    nothing = content_of(tmp_path, name)
    payload = pack({"a": Patch(np.arange(5, dtype=np.float32))})
    DiskMemories(tmp_path).stage(3, Memory(Window(2, 4), ("a",), tensors={"h": np.ones(3, np.float32)}))
    save_all(tmp_path, 12)
    header = aggregator_pb2.UpdateHeader(run="r", tensors=payload.manifest, digest=payload.digest)
    Outbox(tmp_path).put(3, header, payload)
    path, rng = tmp_path / name, np.random.default_rng(0)
    whole, content = path.read_bytes(), content_of(tmp_path, name)
    # Every byte of the small files; of the model its first and last and some of those between.
    positions = np.arange(len(whole))
    if len(whole) > 2000:
        positions = np.concatenate([positions[:300], positions[-50:], rng.choice(positions, 100)])
    for position in positions:
        changed = bytearray(whole)
        if damage == "flip":
            changed[position] ^= int(rng.integers(1, 256))
        elif damage == "cut":
            del changed[position : position + int(rng.integers(1, 20))]
        else:
            changed[position:position] = rng.bytes(int(rng.integers(1, 20)))
        path.write_bytes(changed)
        assert nothing == content_of(tmp_path, name), f"{damage} at byte {position}"
        assert not path.exists()
    path.write_bytes(whole)
    assert content == content_of(tmp_path, name)


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = RunFolder(tmp_path / "state", "r", "first")
        save_all(folder.path, 1)
        folder.memories.stage(0, MEMORY)
        folder.outbox.put(0, aggregator_pb2.UpdateHeader(run="r"), pack({}))
    finally:
        os.umask(before)
    assert 0o700 == stat.S_IMODE(folder.path.stat().st_mode)
    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()}


def test_rounds_that_never_close_do_not_fill_the_disk(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "r", "first")
    (folder.path / ".model.1-1.tmp").write_text("half of a file that a crash left")
    for round_num in range(20):
        folder.outbox.put(round_num, aggregator_pb2.UpdateHeader(run="r"), pack({}))
        folder.memories.stage(round_num, MEMORY)
    RunFolder(tmp_path, "r", "first")
    assert ["identity", "memory-17", "memory-18", "memory-19", "update-18", "update-19"] == sorted(
        path.name for path in folder.path.iterdir()
    )


def test_new_run_of_the_same_name_finds_nothing(tmp_path: Path) -> None:
    RunFolder(tmp_path, "../r", "first").memories.stage(0, MEMORY)
    assert MEMORY == RunFolder(tmp_path, "../r", "first").memories.load(0)
    assert RunFolder(tmp_path, "../r", "second").memories.load(0) is None
    assert ["%2E%2E%2Fr"] == [p.name for p in tmp_path.iterdir()]
