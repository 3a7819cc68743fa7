"""Damaged files: the run they belong to is set aside with the file named, the other runs are served."""

import asyncio
import json
import re
import shutil

import pytest
from fedel_aggregator import runs, versions
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import ShardRun
from fedel_aggregator.tensor_file import TensorFile
from grpc import aio

from fedel.core.compression import compress_update
from fedel.errors import FedelError
from fedel.types import UploadSettings
from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.streams import fetch_model, reason_of
from tests.services.aggregator.support import (
    SPEC,
    aggregator,
    asynchronous,
    begin,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    make_update,
    refusal,
    seal,
    send,
)

FEDDYN = {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 4}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Two runs; one is in its second round, with an update, a label and tensors of its strategy."""
    folder = tmp_path_factory.mktemp("sound")

    async def make():
        async with aggregator(folder) as (stub, _):
            await create(stub, run="sound")
            await create(stub, run="bad", strategy=FEDDYN)
            await send(stub, make_update("a"), run="bad")
            await close(stub, 0, run="bad")
            await stub.KeepVersion(pb.KeepVersionRequest(run="bad", version=1, label="best"))
            await send(stub, make_update("a", 1), run="bad")

    asyncio.run(make())
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "data")


def cut(path):
    path.write_bytes(path.read_bytes()[:40])


def garble(path):
    path.write_bytes(b"\xff\xfe{garbage" * 9)


def flip(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def absurd(path):
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])


def no_json(path):
    header = pb.ModelHeader.FromString(path.read_bytes())
    header.strategy_json = "{"
    path.write_bytes(header.SerializeToString())


def edit(change):
    def edited(path):
        table = json.loads(path.read_bytes())
        change(table)
        path.write_text(json.dumps(table))

    return edited


def replace_by_file(path):
    shutil.rmtree(path)
    path.write_bytes(b"")


VERSION, ROUND = "versions/000001", "rounds/000001/"
SET_ASIDE = {
    "header empty": ("run.pb", lambda path: path.write_bytes(b"")),
    "header garbled": ("run.pb", garble),
    "header missing": ("run.pb", lambda path: path.unlink()),
    "header not JSON": ("run.pb", no_json),
    "facts cut": (f"{VERSION}.json", cut),
    "facts not UTF-8": (f"{VERSION}.json", garble),
    "facts without a key": (f"{VERSION}.json", edit(lambda table: table.pop("crc32"))),
    "facts of other types": (f"{VERSION}.json", edit(lambda table: table.update(crc32=[1]))),
    "facts of one tensor missing": (f"{VERSION}.json", edit(lambda table: table["changed"].popitem())),
    "facts nested too deep": (f"{VERSION}.json", lambda path: path.write_text("[" * 100_000)),
    "facts missing": (f"{VERSION}.json", lambda path: path.unlink()),
    "version cut": (f"{VERSION}.safetensors", cut),
    "version missing": (f"{VERSION}.safetensors", lambda path: path.unlink()),
    "version garbled": (f"{VERSION}.safetensors", garble),
    "version of absurd length": (f"{VERSION}.safetensors", absurd),
    "labels garbled": ("labels.json", garble),
    "labels of other types": ("labels.json", lambda path: path.write_text('{"best": "one"}')),
    "plan garbled": (f"{ROUND}plan.pb", garble),
    "rounds are a file": ("rounds", replace_by_file),
}


async def told(awaitable):
    with pytest.raises(aio.AioRpcError) as caught:
        await awaitable
    assert ("UNAVAILABLE", "damaged") == (caught.value.code().name, reason_of(caught.value))
    return caught.value.details()


@pytest.mark.parametrize("name", SET_ASIDE)
@asynchronous
async def test_damaged_run_is_set_aside(folder, name):
    file, spoil = SET_ASIDE[name]
    spoil(folder / "runs/bad" / file)
    async with aggregator(folder) as (stub, _):
        assert bits(first_model()) == bits((await fetch_model(stub, "sound")).tensors)
        await send(stub, make_update("a"), run="sound")
        assert 1 == (await close(stub, 0, run="sound")).version
        calls = [fetch_model(stub, "bad"), send(stub, make_update("b", 1), run="bad"), seal(stub, 1, run="bad")]
        for call in [*calls, create(stub, run="bad", strategy=FEDDYN)]:
            text = await told(call)
            assert str(folder / "runs/bad" / file) in text, text
    assert (folder / "runs/bad/versions/000000.safetensors").exists(), "nothing was deleted"


@pytest.mark.parametrize("spoil", [cut, garble, flip, absurd, lambda path: flip(path, 20)])
@asynchronous
async def test_damaged_update_counts_as_not_sent(folder, spoil):
    path = folder / f"runs/bad/{ROUND}a.update"
    spoil(path)
    async with aggregator(folder) as (stub, _):
        assert path.with_suffix(".bad").exists()
        await send(stub, make_update("b", 1), run="bad")
        assert not (await send(stub, make_update("a", 1), run="bad")).duplicate
        assert ["a", "b"] == [report.client for report in await seal(stub, 1, run="bad")]
        assert 2 == (await close(stub, 1, run="bad")).version


@asynchronous
async def test_damaged_update_of_a_sealed_round(folder):
    path = folder / f"runs/bad/{ROUND}a.update"
    async with aggregator(folder) as (stub, _):
        await seal(stub, 1, run="bad")
    flip(path)
    async with aggregator(folder) as (stub, _):
        assert f"{path}, " in await told(seal(stub, 1, run="bad"))
    assert path.exists()


@asynchronous
async def test_foreign_files_are_ignored_and_kept(folder):
    bad = folder / "runs/bad"
    foreign = [bad / "versions/notes.json", bad / "versions/2024.json", bad / "rounds/.DS_Store"]
    foreign += [bad / "notes.json", folder / "runs/.DS_Store", folder / "spare/.DS_Store"]
    for path in foreign:
        path.write_text("mine")
    (folder / "runs/empty").mkdir()
    async with aggregator(folder) as (stub, _):
        assert 2 == (await close(stub, 1, run="bad")).version
        await send(stub, make_update("a", 2), run="bad")
    assert ["mine"] * len(foreign) == [path.read_text() for path in foreign]


def spoil_tensor(path, name):
    """Flip a bit in the values of a tensor."""
    with TensorFile(path) as file:
        place = file.places[name]
    flip(path, place.offset + 5)


@asynchronous
async def test_bit_rot_gets_no_new_checksum(tmp_path):
    path = tmp_path / "runs/run/versions/000000.safetensors"
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a", names={"one.weight"}))
        spoil_tensor(path, "two.exit")
        text = await told(close(stub, 0))
        assert f"version file is damaged: {path}, tensor 'two.exit'" in text
        assert [] == list(path.parent.glob("000001*"))
        assert str(path) in await told(fetch_model(stub, "run")), "the run is set aside"


@asynchronous
async def test_bit_rot_is_not_sent(tmp_path, monkeypatch):
    path = tmp_path / "runs/run/versions/000000.safetensors"
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await fetch_model(stub, "run")
        spoil_tensor(path, "three.weight")
        monkeypatch.setattr(versions, "VERIFY_SECONDS", 0.0)
        assert f"version file is damaged: {path}, tensor 'three.weight'" in await told(fetch_model(stub, "run"))


@asynchronous
async def test_a_change_of_a_verified_file_is_seen_at_once(tmp_path):
    """Neither what was just fetched nor what was just written is trusted if its file was changed since."""
    async with aggregator(tmp_path) as (stub, _):
        for run in ("fetched", "written"):
            await create(stub, run=run)
            await send(stub, make_update("a"), run=run)
            await close(stub, 0, run=run)
        await fetch_model(stub, "fetched")
        for run in ("fetched", "written"):
            path = tmp_path / f"runs/{run}/versions/000001.safetensors"
            spoil_tensor(path, "three.weight")
            text = await told(fetch_model(stub, run))
            assert f"version file is damaged: {path}, tensor 'three.weight'" in text


@asynchronous
async def test_damaged_old_version_harms_no_round(folder):
    spoil_tensor(folder / "runs/bad/versions/000000.safetensors", "one.weight")
    async with aggregator(folder) as (stub, _):
        assert "000000.safetensors" in await told(fetch_model(stub, "bad", version=0))
        assert 1 == (await fetch_model(stub, "bad")).version
        assert 2 == (await close(stub, 1, run="bad")).version


@asynchronous
async def test_damaged_tensors_of_the_strategy(folder):
    path = folder / "runs/bad/versions/000001.state.safetensors"
    flip(path)
    async with aggregator(folder) as (stub, _):
        assert str(path) in await told(close(stub, 1, run="bad"))


@asynchronous
async def test_damaged_answer_of_a_sealed_round(folder):
    path = folder / "runs/bad/versions/000001.sealed.pb"
    garble(path)
    async with aggregator(folder) as (stub, _):
        assert str(path) in await told(seal(stub, 0, run="bad"))


@asynchronous
async def test_restored_run_is_served_again(folder, monkeypatch):
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.0)
    path = folder / "runs/bad/versions/000001.safetensors"
    good = path.read_bytes()
    spoil_tensor(path, "one.weight")
    async with aggregator(folder) as (stub, _):
        for _ in range(2):
            assert "tensor 'one.weight'" in await told(close(stub, 1, run="bad"))
        path.write_bytes(good)
        assert 2 == (await close(stub, 1, run="bad")).version


@pytest.mark.parametrize("options", [{"upload": {"compression": "int8"}}, {"protection": {"clip_norm": 0.5}}])
@asynchronous
async def test_damaged_version_costs_no_update(tmp_path, monkeypatch, options):
    """Where updates are folded with the version that they started from: they wait until it is restored."""
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.0)
    path = tmp_path / "runs/run/versions/000000.safetensors"
    upload = UploadSettings(**options.get("upload", {}))
    sent, late = (compress_update(upload, SPEC, make_update(name), first_model(), {})[0] for name in "ab")
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, **options)
        await send(stub, sent)
    good = path.read_bytes()
    spoil_tensor(path, "three.weight")
    async with aggregator(tmp_path) as (stub, _):
        for _ in range(4):
            assert "tensor 'three.weight'" in await told(send(stub, late))
        path.write_bytes(good)
        assert (await send(stub, sent)).duplicate
        spoil_tensor(path, "three.weight")
        for _ in range(4):
            assert "tensor 'three.weight'" in await told(send(stub, late))
        path.write_bytes(good)
        assert not (await send(stub, late)).duplicate
        assert ["a", "b"] == [report.client for report in await seal(stub, 0)]


@asynchronous
async def test_upload_goes_on_over_a_damage(tmp_path, monkeypatch):
    """A run that is set aside and loaded again during an upload takes that upload."""
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.0)
    path = tmp_path / "runs/run/versions/000000.safetensors"
    updates = [make_update("a"), make_update("b")]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, updates[0])
        good = path.read_bytes()
        call = await begin(stub, updates[1], 10**9)
        spoil_tensor(path, "one.weight")
        await told(fetch_model(stub, "run"))
        path.write_bytes(good)
        await call.done_writing()
        assert not (await call.read()).receipt.duplicate
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly(updates, first_model()).model) == bits(model)


@asynchronous
async def test_run_that_cannot_be_looked_at(folder, monkeypatch):
    """A passing error at the start sets one run aside; it is served when the error has passed."""
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.0)
    broken = [PermissionError(13, "Permission denied", str(folder / "runs/bad/run.pb"))]
    is_run = runs._is_run

    def failing(path):
        if path.name == "bad" and broken:
            raise broken[0]
        return is_run(path)

    monkeypatch.setattr(runs, "_is_run", failing)
    async with aggregator(folder) as (stub, _):
        assert 0 == (await fetch_model(stub, "sound")).version
        assert "Permission denied" in await told(fetch_model(stub, "bad"))
        broken.clear()
        assert 1 == (await fetch_model(stub, "bad")).version


@asynchronous
async def test_deleted_run_is_unknown(folder, monkeypatch):
    """What the advice says for a run that nobody can restore."""
    monkeypatch.setattr(runs, "RETRY_SECONDS", 0.0)
    garble(folder / "runs/bad/run.pb")
    async with aggregator(folder) as (stub, _):
        await told(fetch_model(stub, "bad"))
        shutil.rmtree(folder / "runs/bad")
        assert ("NOT_FOUND", "unknown_run") == await refusal(fetch_model(stub, "bad"))
        assert 0 == await create(stub, run="bad")


def test_only_fedel_errors(folder):
    """Readers of one file, over many kinds of damage: nothing but an error for people."""
    bad, recycled = folder / "runs/bad", RecycledFiles(folder / "spare")
    files = [path for path in bad.rglob("*") if path.is_file() and not path.name.startswith("000000")]
    assert 8 == len(files), files
    texts = []
    for path in files:
        good = path.read_bytes()
        for place in range(0, min(len(good), 400), 7):
            data = bytearray(good)
            data[place] ^= 0x55
            path.write_bytes(data)
            try:
                ShardRun(bad, recycled)
            except FedelError as error:
                texts.append(str(error))
            path.unlink(missing_ok=True)
            path.with_suffix(".bad").unlink(missing_ok=True)
            path.write_bytes(good)
    assert len(texts) > 100
    assert [] == [text for text in texts if not re.search(r"/runs/bad/\S+", text)]
