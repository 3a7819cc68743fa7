"""Updates: taken once, folded exactly, refused without a trace."""

import itertools

import numpy as np
import pytest
from grpc import aio

from fedel.audit.audit import Sources, audit
from fedel.types import Patch
from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.codec import report_to_pb
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model
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
    late_as,
    make_update,
    metric,
    open_round,
    refusal,
    refusals,
    seal,
    send,
)

UNEVEN = {"a": None, "b": {"one.weight", "one.mean"}, "c": {"two.weight", "two.exit"}}
"""What each client trains; nobody but ``a`` trains the third block."""


def uneven_updates(round_num=0):
    return [make_update(client, round_num, names) for client, names in UNEVEN.items()]


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
async def test_rounds_equal_the_direct_fold(tmp_path, strategy):
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
async def test_order_of_arrival(tmp_path):
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
async def test_partial_tensors(tmp_path):
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
async def test_sent_again_counts_once(tmp_path):
    update = make_update("a")
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        first, again = await send(stub, update), await send(stub, update)
        assert (False, True) == (first.duplicate, again.duplicate)
        assert (pack(update.patches).num_bytes, 0) == (first.num_bytes, again.num_bytes)
        answer = await close(stub, 0)
        assert [1] * len(SPEC.tensors) == list(answer.num_clients)
        # A client that missed its receipt sends the update again after the round is closed.
        assert (await send(stub, update)).duplicate
        assert [1, 2] == [
            metric(servicer, "fedel_uploads_total", outcome=outcome) for outcome in ("accepted", "duplicate")
        ]


@asynchronous
async def test_same_bytes_in_the_next_round(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for round_num in range(2):
            empty = make_update("a", round_num, names=())
            assert not (await send(stub, empty)).duplicate
            await close(stub, round_num)


@asynchronous
async def test_other_update_with_the_same_key(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        await send(stub, make_update("a"))
        assert ("ALREADY_EXISTS", "conflict") == await refusal(send(stub, make_update("a", seed=1)))
        assert {"conflict": 1} == refusals(servicer)
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
    assert bits(fold_directly([make_update("a")], first_model()).model) == bits(model)


@asynchronous
async def test_late_and_early(tmp_path):
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub)
        await send(stub, make_update("a"))
        await close(stub, 0)
        assert ("FAILED_PRECONDITION", "late") == await refusal(send(stub, make_update("b")))
        assert ("FAILED_PRECONDITION", "early") == await refusal(send(stub, make_update("b", 2)))
        assert ("NOT_FOUND", "unknown_run") == await refusal(send(stub, make_update("b"), run="other"))
        assert {"late": 1, "early": 1, "unknown_run": 1} == refusals(servicer)


@asynchronous
async def test_names_of_runs_are_not_told(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, run="secret")
        with pytest.raises(aio.AioRpcError, match="no run 'other' here; `fedel runs` lists them") as caught:
            await send(stub, make_update("b"), run="other")
        assert "secret" not in caught.value.details()


@asynchronous
async def test_sealed_during_an_upload(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        call = await begin(stub, make_update("a"), 10**9)
        await seal(stub, 0)
        await call.done_writing()
        assert ("UNAVAILABLE", "sealed") == await refusal(call.read())
        assert [] == await seal(stub, 0)
        await open_round(stub, 0, clients="a")
        assert 0 == (await send(stub, make_update("a"))).num_bytes, "all of it is there"
        assert ["a"] == [report.client for report in await seal(stub, 0)]


@asynchronous
async def test_late_policy_next(tmp_path):
    late, other = make_update("a", 0), make_update("b", 1)
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, late="next")
        await send(stub, make_update("b", 0))
        under_way = await begin(stub, make_update("c", 0), 500_000)
        await seal(stub, 0)
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
        caught_up = [late_as(update, 1.0, first_model(), model) for update in (late, make_update("c", 0))]
        expected = fold_directly([*caught_up, other], model).model
        assert bits(expected) == bits((await fetch_model(stub, "run")).tensors)
        assert (await send(stub, late)).duplicate
        assert ("FAILED_PRECONDITION", "late") == await refusal(send(stub, make_update("d", 0)))


@pytest.mark.parametrize("keep_updates", [0, -1])
@asynchronous
async def test_what_another_aggregator_did_not_have_yet_counts_in_the_next_round(tmp_path, keep_updates):
    """It was acknowledged here, so its client does not send it again; nor is it lost in a restart."""
    early, other = make_update("a", 0), make_update("b", 1)
    async with aggregator(tmp_path, keep_updates=keep_updates) as (stub, _):
        await create(stub, late="next")
        for update in (early, make_update("b", 0)):
            await send(stub, update)
        await close(stub, 0, ["b"])
        model = (await fetch_model(stub, "run")).tensors
        assert (await send(stub, early)).duplicate
    async with aggregator(tmp_path, keep_updates=keep_updates) as (stub, _):
        await send(stub, other)
        assert ["a", "b"] == [report.client for report in await seal(stub, 1)]
        await close(stub, 1)
        caught_up = late_as(early, 1.0, first_model(), model)
        made = (await fetch_model(stub, "run")).tensors
        assert bits(fold_directly([caught_up, other], model).model) == bits(made)
        # Twice it cannot count, nor two rounds later.
        assert (await send(stub, early)).duplicate
        await send(stub, make_update("c", 2))
        assert ["c"] == [report.client for report in await seal(stub, 2)]
    if keep_updates:
        assert () == audit(Sources("run", (tmp_path,))).findings


@asynchronous
async def test_what_was_given_up_makes_room_for_the_next_task(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, late="next")
        for client in "ab":
            await send(stub, make_update(client, 0))
        await stub.SealRound(pb.SealRoundRequest(run="run", round_num=0)).read()
        await stub.CommitRound(pb.CommitRoundRequest(run="run", round_num=0, clients=["b"]))
        await open_round(stub, 1, oldest=0)
        assert not (await send(stub, make_update("a", 1))).duplicate
        assert [("a", 1)] == [(report.client, report.round_num) for report in await seal(stub, 1)]


@pytest.mark.parametrize("strategy", ["fedavg", "fednova"])
@asynchronous
async def test_late_policy_weigh(tmp_path, strategy):
    """A change counts less with every round, also after restarts; once, and not for ever."""
    settings = {"late": "weigh", "max_staleness": 2, "staleness_power": 0.5}
    models, strategy = [first_model()], {"name": strategy}
    late = [make_update("a", 0), make_update("b", 1)]
    for round_num, sent in enumerate(([], [], [*late, make_update("c", 2)])):
        async with aggregator(tmp_path, keep_updates=-1) as (stub, _):
            if round_num == 0:
                await create(stub, models[0], strategy, **settings)
            for update in sent:
                await send(stub, update)
        async with aggregator(tmp_path, keep_updates=-1) as (stub, _):
            await open_round(stub, round_num, oldest=2)
            for update in sent:
                assert (await send(stub, update)).duplicate
            await send(stub, make_update("d", round_num))
            await close(stub, round_num, oldest=3)
            models.append((await fetch_model(stub, "run")).tensors)
    counted = [
        late_as(late[0], round(3**-0.5 * 2**30) / 2**30, models[0], models[2]),
        late_as(late[1], round(2**-0.5 * 2**30) / 2**30, models[1], models[2]),
        make_update("c", 2),
        make_update("d", 2),
    ]
    assert bits(fold_directly(counted, models[2], strategy).model) == bits(models[3])
    async with aggregator(tmp_path, keep_updates=-1) as (stub, _):
        # What counted in round 2 does not count again in round 3; and round 0 is three rounds ago.
        assert (await send(stub, late[1])).duplicate
        assert ("ALREADY_EXISTS", "conflict") == await refusal(send(stub, make_update("b", 1, seed=1)))
        assert ("FAILED_PRECONDITION", "late") == await refusal(send(stub, make_update("e", 0)))
    found = audit(Sources("run", (tmp_path,)))
    assert ((), 3) == (found.findings, found.num_recomputed)


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
async def test_refused_update_leaves_nothing(tmp_path, spoil, reason, strategy):
    spoilt, sound = make_update("a"), make_update("b")
    spoil(spoilt)
    async with aggregator(tmp_path) as (stub, servicer):
        await create(stub, strategy={"name": strategy})
        assert ("INVALID_ARGUMENT", reason) == await refusal(send(stub, spoilt))
        assert {reason: 1} == refusals(servicer)
        assert [] == [p for p in tmp_path.rglob("*") if p.suffix in (".part", ".update")]
        await send(stub, sound)
        sealed = await seal(stub, 0)
        assert ["b"] == [report.client for report in sealed]
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
        assert bits(fold_directly([sound], first_model(), {"name": strategy}).model) == bits(model)


@asynchronous
async def test_weight_comes_from_the_join(tmp_path):
    honest = [make_update("a"), make_update("b")]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a", num_samples=2**50))
        await send(stub, make_update("b", num_samples=0))
        await close(stub, 0)
        model = (await fetch_model(stub, "run")).tensors
        assert bits(fold_directly(honest, first_model()).model) == bits(model)


@asynchronous
async def test_update_without_a_task(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await open_round(stub, 0, clients="ab")
        assert ("FAILED_PRECONDITION", "unplanned") == await refusal(send(stub, make_update("c")))
        await send(stub, make_update("a"))
        assert ["a"] == [report.client for report in await seal(stub, 0)]


@asynchronous
async def test_sealed_round_opens_again(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        await send(stub, make_update("a"))
        await seal(stub, 0)
        assert ("UNAVAILABLE", "sealed") == await refusal(send(stub, make_update("b"))), "it may come again"
        await open_round(stub, 0, clients="ab")
    async with aggregator(tmp_path) as (stub, _):
        await send(stub, make_update("b"))
        assert ["a", "b"] == [report.client for report in await seal(stub, 0)]
        await close(stub, 0)
        await open_round(stub, 0, clients="c")  # a repetition that comes late
        assert ("FAILED_PRECONDITION", "late") == await refusal(send(stub, make_update("c")))


@asynchronous
async def test_client_left_out_of_the_commit(tmp_path):
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
async def test_repeated_seal_and_commit(tmp_path):
    commit = pb.CommitRoundRequest(run="run", round_num=0, clients=["a", "b"])
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        for client in "ab":
            await send(stub, make_update(client))
        missing = pb.CommitRoundRequest(run="run", round_num=0, clients=["a", "z"])
        assert ("FAILED_PRECONDITION", "missing") == await refusal(stub.CommitRound(missing))
        sealed = [await seal(stub, 0) for _ in range(2)]
        committed = [await stub.CommitRound(commit) for _ in range(2)]
        sealed.append(await seal(stub, 0))
    async with aggregator(tmp_path) as (stub, _):
        sealed.append(await seal(stub, 0))
        committed.append(await stub.CommitRound(commit))
        later = pb.CommitRoundRequest(run="run", round_num=2)
        assert ("FAILED_PRECONDITION", "other_round") == await refusal(stub.CommitRound(later))
    assert [report_to_pb(make_update(c).report) for c in "ab"] == sealed[0]
    assert [sealed[0]] * 4 == sealed
    assert [committed[0]] * 3 == committed


@asynchronous
async def test_no_version_of_nothing(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        assert ("FAILED_PRECONDITION", "empty") == await refusal(close(stub, 0))
        assert 0 == (await fetch_model(stub, "run")).version
        await open_round(stub, 0)
        await send(stub, make_update("a"))
        assert 1 == (await close(stub, 0)).version
