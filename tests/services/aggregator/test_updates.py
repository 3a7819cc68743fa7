"""Updates: taken once, folded exactly, refused without a trace, resumed where they broke."""

import asyncio
import itertools

import numpy as np
import pytest
from fedel_aggregator import uploads

from fedel.types import Patch
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1.model_pb2 import Chunk
from fedel.wire.codec import report_to_pb
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model, push_update
from tests.services.aggregator.support import (
    SPEC,
    aggregator,
    asynchronous,
    bits,
    close,
    create,
    first_model,
    fold_directly,
    make_update,
    refusal,
    send,
)

UNEVEN = {"a": None, "b": {"one.weight", "one.mean"}, "c": {"two.weight", "two.exit"}}
"""What each client trains; nobody but ``a`` trains the third block."""


def uneven_updates(round_num=0):
    return [make_update(client, round_num, names) for client, names in UNEVEN.items()]


def header_of(update, run="run"):
    payload = pack(update.patches)
    return pb.UpdateHeader(
        run=run, report=report_to_pb(update.report), tensors=payload.manifest, digest=payload.digest
    )


async def begin(stub, update, num_bytes):
    """Send a part of an update and leave the stream open."""
    call = stub.PutUpdate()
    await call.write(pb.PutUpdateRequest(header=header_of(update)))
    permit = (await call.read()).permit
    sent = 0
    for chunk in pack(update.patches).chunks(permit.offset):
        data = chunk.data[: num_bytes - sent]
        if data:
            await call.write(pb.PutUpdateRequest(chunk=Chunk(offset=chunk.offset, data=data)))
        sent += len(data)
    return call


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "strategy",
    [
        {"name": "fedavg", "weighting": "samples"},
        {"name": "fedel"},
        {"name": "fednova"},
        {"name": "pyramidfl"},
    ],
    ids=lambda table: table["name"],
)
@asynchronous
async def test_rounds_over_grpc_are_the_direct_fold_to_the_bit(tmp_path, strategy):
    model = first_model()
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, model, strategy)
        for round_num in range(2):
            updates = uneven_updates(round_num)
            for update in updates:
                await send(stub, update)
            answer = await close(stub, round_num)
            closed = fold_directly(updates, model, strategy)
            assert round_num + 1 == answer.version
            assert closed.global_importance == dict(zip(answer.tensors, answer.global_importance, strict=True))
            assert closed.num_clients == dict(zip(answer.tensors, answer.num_clients, strict=True))
            model = closed.model
            assert bits(model) == bits((await fetch_model(stub, "run")).tensors)


@asynchronous
async def test_every_order_of_arrival_gives_the_same_bits(tmp_path):
    models = set()
    for number, order in enumerate(itertools.permutations(uneven_updates())):
        async with aggregator(tmp_path / str(number)) as (stub, _):
            await create(stub)
            for update in order:
                await send(stub, update)
            await close(stub, 0)
            models.add(tuple(bits((await fetch_model(stub, "run")).tensors).items()))
    assert 1 == len(models)


@asynchronous
async def test_parts_of_tensors_fold_as_they_would_directly(tmp_path):
    rng = np.random.default_rng(3)
    mask = rng.random((700, 500)) < 0.3
    narrow = make_update("a", names=())
    narrow.patches["one.weight"] = Patch(np.ones((2, 2), np.float32), (slice(0, 2), slice(0, 2)))
    masked = make_update("b", names=())
    masked.patches["two.weight"] = Patch(rng.random(int(mask.sum())).astype(np.float32), mask)
    updates = [narrow, masked, make_update("c")]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for update in updates:
            await send(stub, update)
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly(updates, first_model()).model) == bits(model)


@asynchronous
async def test_an_update_sent_again_counts_once(tmp_path):
    update = make_update("a")
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        first, again = await send(stub, update), await send(stub, update)
        assert (False, True) == (first.duplicate, again.duplicate)
        assert (pack(update.patches).num_bytes, 0) == (first.num_bytes, again.num_bytes)
        answer = await close(stub, 0)
        assert [1] * len(SPEC.tensors) == list(answer.num_clients)
        # The client that did not hear the receipt asks again when the round is over.
        assert (await send(stub, update)).duplicate
        assert {"committed": 1, "duplicate": 2} == {k: servicer.counts[k] for k in ("committed", "duplicate")}


@asynchronous
async def test_the_same_bytes_in_the_next_round_count_again(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for round_num in range(2):
            empty = make_update("a", round_num, names=())
            assert not (await send(stub, empty)).duplicate
            await close(stub, round_num)


@asynchronous
async def test_another_update_under_the_same_key_is_refused(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        await send(stub, make_update("a"))
        assert ("ALREADY_EXISTS", "conflict") == await refusal(send(stub, make_update("a", seed=1)))
        assert 1 == servicer.counts["refused:conflict"]
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly([make_update("a")], first_model()).model) == bits(model)


@asynchronous
async def test_late_and_early_updates_are_refused(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        await send(stub, make_update("a"))
        await stub.SealRound(pb.SealRoundRequest(run="run", round_num=0))
        assert ("FAILED_PRECONDITION", "late") == await refusal(send(stub, make_update("b")))
        await close(stub, 0)
        assert ("FAILED_PRECONDITION", "late") == await refusal(send(stub, make_update("b")))
        assert ("FAILED_PRECONDITION", "early") == await refusal(send(stub, make_update("b", 2)))
        assert ("NOT_FOUND", "unknown_run") == await refusal(send(stub, make_update("b"), run="other"))
        assert {"late": 2, "early": 1, "unknown_run": 1} == {
            reason: servicer.counts[f"refused:{reason}"] for reason in ("late", "early", "unknown_run")
        }


@asynchronous
async def test_an_upload_that_is_under_way_when_its_round_is_sealed_is_late(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        call = await begin(stub, make_update("a"), 10**9)
        await stub.SealRound(pb.SealRoundRequest(run="run", round_num=0))
        await call.done_writing()
        assert ("FAILED_PRECONDITION", "late") == await refusal(call.read())
        assert {0} == set((await close(stub, 0)).num_clients)


@asynchronous
async def test_with_late_next_an_update_counts_in_the_round_after_its_own_and_only_once(tmp_path):
    late, other = make_update("a", 0), make_update("b", 1)
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, late="next")
        await send(stub, make_update("b", 0))
        under_way = await begin(stub, make_update("c", 0), 500_000)
        await stub.SealRound(pb.SealRoundRequest(run="run", round_num=0))
        assert ("UNAVAILABLE", "sealed") == await refusal(send(stub, late))
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
        assert not (await send(stub, late)).duplicate
        assert (await send(stub, late)).duplicate
        # What was counted in round 0 does not count again in round 1.
        assert (await send(stub, make_update("b", 0))).duplicate
        assert ("ALREADY_EXISTS", "conflict") == await refusal(send(stub, make_update("a", 1)))
        # What broke off in round 0 goes on in round 1.
        under_way.cancel()
        payload = pack(make_update("c", 0).patches)
        assert payload.num_bytes - 500_000 == (await send(stub, make_update("c", 0))).num_bytes
        await send(stub, other)
        await close(stub, 1)
        expected = fold_directly([late, other, make_update("c", 0)], model).model
        assert bits(expected) == bits((await fetch_model(stub, "run")).tensors)
        assert (await send(stub, late)).duplicate
        assert ("FAILED_PRECONDITION", "late") == await refusal(send(stub, make_update("d", 0)))


def wrong_shape(update):
    update.patches["one.weight"] = Patch(np.zeros((3, 4), np.float32))


def unknown_tensor(update):
    update.patches["four.weight"] = Patch(np.zeros(3, np.float32))


def not_finite(update):
    update.patches["one.mean"].values[2] = np.inf


def out_of_range(update):
    update.patches["one.mean"].values[2] = 1e30


@pytest.mark.parametrize("strategy", ["fedavg", "fednova"])
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (wrong_shape, "shape"),
        (unknown_tensor, "unknown_tensor"),
        (not_finite, "not_finite"),
        (out_of_range, "range"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@asynchronous
async def test_a_refused_update_leaves_nothing_behind(tmp_path, spoil, reason, strategy):
    spoilt, sound = make_update("a"), make_update("b")
    spoil(spoilt)
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub, strategy={"name": strategy})
        assert ("INVALID_ARGUMENT", reason) == await refusal(send(stub, spoilt))
        assert {f"refused:{reason}": 1} == {k: v for k, v in servicer.counts.items() if k.startswith("refused")}
        assert [] == [p for p in tmp_path.rglob("*") if p.suffix in (".part", ".update")]
        await send(stub, sound)
        sealed = await stub.SealRound(pb.SealRoundRequest(run="run", round_num=0))
        assert ["b"] == [report.client for report in sealed.reports]
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
        assert bits(fold_directly([sound], first_model(), {"name": strategy}).model) == bits(model)


@asynchronous
async def test_samples_that_cannot_weigh_are_refused(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        assert ("INVALID_ARGUMENT", "weight") == await refusal(send(stub, make_update("a", num_samples=0)))


async def raw(stub, header, chunks):
    """An upload by hand, to the receipt."""
    call = stub.PutUpdate()
    await call.write(pb.PutUpdateRequest(header=header))
    await call.read()
    for offset, data in chunks:
        await call.write(pb.PutUpdateRequest(chunk=Chunk(offset=offset, data=data)))
    await call.done_writing()
    return await call.read()


@asynchronous
async def test_bytes_that_are_not_what_was_announced_are_refused(tmp_path):
    update = make_update("a", names={"three.weight"})
    payload = pack(update.patches)
    data, header = bytes(payload.buffers[0]), header_of(update)
    wrong = {
        "gap": [(0, data[:8]), (12, data[12:])],
        "out of order": [(8, data[8:]), (0, data[:8])],
        "twice": [(0, data), (0, data)],
        "too many": [(0, data + b"1234")],
        "more after the end": [(0, data), (44, b"1234")],
        "too few": [(0, data[:40])],
        "empty piece": [(0, b"")],
    }
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        for chunks in wrong.values():
            (tmp_path / "runs/run/rounds/000000/a.part").unlink(missing_ok=True)
            assert ("INVALID_ARGUMENT", "size") == await refusal(raw(stub, header, chunks))
        assert len(wrong) == servicer.counts["refused:size"]
        (tmp_path / "runs/run/rounds/000000/a.part").unlink()
        damaged = data[:8] + b"\0\0\0\0" + data[12:]
        assert ("DATA_LOSS", "checksum") == await refusal(raw(stub, header, [(0, damaged)]))
        header.digest = "0" * 64
        assert ("INVALID_ARGUMENT", "digest") == await refusal(raw(stub, header, []))
        header.report.client = ""
        assert ("INVALID_ARGUMENT", "header") == await refusal(raw(stub, header, []))
        no_header = stub.PutUpdate()
        await no_header.done_writing()
        assert ("INVALID_ARGUMENT", "header") == await refusal(no_header.read())
        # After damage on the way the same update is taken from its first byte.
        assert len(data) == (await send(stub, update)).num_bytes


@asynchronous
async def test_an_upload_cut_at_half_goes_on_from_there(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "BATCH_BYTES", 1)
    update = make_update("a")
    payload = pack(update.patches)
    half = payload.num_bytes // 2
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        call = await begin(stub, update, half)
        path = tmp_path / "runs/run/rounds/000000/a.part"
        await until(lambda: path.exists() and path.stat().st_size > half)
        call.cancel()
        pushed = await push_update(stub, "run", update.report, payload)
        assert payload.num_bytes - half == pushed.num_bytes
        assert payload.num_bytes - half == servicer.counts["bytes_up"]
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly([update], first_model()).model) == bits(model)


@asynchronous
async def test_a_client_that_comes_again_takes_over_from_its_dead_stream(tmp_path):
    update = make_update("a")
    async with aggregator(tmp_path, max_uploads=1) as (stub, _):
        await create(stub)
        dead = await begin(stub, update, 100)
        pushed = await send(stub, update)
        assert not pushed.duplicate
        assert ("ABORTED", "superseded") == await refusal(dead.read())


@asynchronous
async def test_only_so_many_clients_send_at_once_and_a_dead_stream_frees_its_permit(tmp_path):
    async with aggregator(tmp_path, max_uploads=2) as (stub, servicer):
        await create(stub)
        sending = [await begin(stub, make_update(client), 10) for client in "ab"]
        waiting = [asyncio.create_task(send(stub, make_update(client))) for client in "cdef"]
        await asyncio.wait(waiting, timeout=0.3)
        assert [False] * 4 == [task.done() for task in waiting]
        sending[0].cancel()
        pushed = await asyncio.gather(*waiting)
        assert [False] * 4 == [p.duplicate for p in pushed]
        assert min(p.wait_seconds for p in pushed) > 0.25
        sending[1].cancel()
        assert ["c", "d", "e", "f"] == [
            r.client for r in (await stub.SealRound(pb.SealRoundRequest(run="run", round_num=0))).reports
        ]
        await until(lambda: servicer._uploads._permits._value == 2)


@asynchronous
async def test_a_stream_that_stands_still_is_ended(tmp_path):
    update = make_update("a")
    async with aggregator(tmp_path, idle_seconds=0.1) as (stub, _):
        await create(stub)
        call = await begin(stub, update, 100)
        assert ("DEADLINE_EXCEEDED", "idle") == await refusal(call.read())
        assert pack(update.patches).num_bytes - 100 == (await send(stub, update)).num_bytes
        silent = stub.PutUpdate()
        assert ("DEADLINE_EXCEEDED", "idle") == await refusal(silent.read())


@asynchronous
async def test_a_client_left_out_at_the_commit_is_not_in_the_model(tmp_path):
    updates = uneven_updates()
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for update in updates:
            await send(stub, update)
        answer = await close(stub, 0, clients=["c", "a"])
        model = (await fetch_model(stub, "run")).tensors
        expected = fold_directly([updates[0], updates[2]], first_model())
        assert bits(expected.model) == bits(model)
        assert expected.num_clients == dict(zip(answer.tensors, answer.num_clients, strict=True))


@asynchronous
async def test_seal_and_commit_asked_again_give_the_same_answer(tmp_path):
    seal = pb.SealRoundRequest(run="run", round_num=0)
    commit = pb.CommitRoundRequest(run="run", round_num=0, clients=["a", "b"])
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for client in "ab":
            await send(stub, make_update(client))
        missing = pb.CommitRoundRequest(run="run", round_num=0, clients=["a", "z"])
        assert ("FAILED_PRECONDITION", "missing") == await refusal(stub.CommitRound(missing))
        sealed = [await stub.SealRound(seal) for _ in range(2)]
        committed = [await stub.CommitRound(commit) for _ in range(2)]
        sealed.append(await stub.SealRound(seal))
    async with aggregator(tmp_path) as (stub, _):
        sealed.append(await stub.SealRound(seal))
        committed.append(await stub.CommitRound(commit))
        later = pb.CommitRoundRequest(run="run", round_num=2)
        assert ("FAILED_PRECONDITION", "early") == await refusal(stub.CommitRound(later))
    assert [report_to_pb(make_update(c).report) for c in "ab"] == list(sealed[0].reports)
    assert [sealed[0]] * 4 == sealed
    assert [committed[0]] * 3 == committed


@asynchronous
async def test_a_round_without_updates_keeps_the_model_to_the_bit(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        answer = await close(stub, 0)
        assert (1, {0.0}) == (answer.version, set(answer.global_importance))
        assert bits(first_model()) == bits((await fetch_model(stub, "run")).tensors)


@asynchronous
async def test_client_names_never_leave_their_folder(tmp_path):
    names = ["../../evil", ".", "..", "a/b", "x" * 500, "käse"]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for name in names:
            await send(stub, make_update(name, names={"three.weight"}))
        sealed = await stub.SealRound(pb.SealRoundRequest(run="run", round_num=0))
        assert sorted(names) == [report.client for report in sealed.reports]
        assert len(names) == len(list((tmp_path / "runs/run/rounds/000000").glob("*.update")))
