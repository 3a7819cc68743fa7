"""The average over versions on an aggregator: served to those who ask for it, and across restarts."""

import pytest

from fedel.job import Server
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.strategies.protection import RoundStart
from fedel.strategies.server_steps import averages
from fedel.wire.streams import fetch_model, model_header, push_model
from tests.services.aggregator.support import (
    SPEC,
    aggregator,
    asynchronous,
    bits,
    close,
    create,
    first_model,
    make_update,
    refusal,
    send,
)

FEDEL = {"name": "fedel", "weighting": "samples", "damping": 0.5}
SERVER = {"average": 0.75, "momentum": 0.3}
ROUNDS = [
    [make_update("a", 0), make_update("b", 0, ["one.weight"])],
    [make_update("b", 1, ["one.weight", "one.mean"]), make_update("c", 1, [])],
    [make_update("a", 2, ["three.weight"]), make_update("c", 2, ["two.exit"])],
]


def folded(num_rounds):
    """What comes of the rounds, computed directly."""
    model, state = first_model(), {}
    for number, updates in enumerate(ROUNDS[:num_rounds]):
        fold = RoundFold(build(FEDEL), SPEC, start=RoundStart(model, number), server=Server(**SERVER))
        for update in updates:
            fold.add(update)
        closed = fold.finish(model, state)
        model, state = closed.model, closed.state
    return model, averages(state)


async def play(stub, numbers):
    for number in numbers:
        for update in ROUNDS[number]:
            await send(stub, update)
        await close(stub, number)


@asynchronous
async def test_the_average_is_served_on_request_also_after_a_restart(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, strategy=FEDEL, server=SERVER)
        assert {} == (await fetch_model(stub, "run", average=True)).tensors
        await play(stub, [0, 1])
    async with aggregator(tmp_path) as (stub, _):
        await play(stub, [2])
        for version in (2, 3):
            model, averaged = folded(version)
            assert bits(model) == bits((await fetch_model(stub, "run", version)).tensors)
            got = await fetch_model(stub, "run", version, average=True)
            assert version == got.version
            assert bits(averaged) == bits(got.tensors)
        held = dict.fromkeys(["one.mean", "three.weight"], 3)
        got = await fetch_model(stub, "run", 3, spec=SPEC, held=held, average=True)
        assert held.keys() == got.tensors.keys()


@asynchronous
async def test_a_run_without_an_average_has_none_to_send(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, strategy=FEDEL)
        await play(stub, [0])
        got = await fetch_model(stub, "run", average=True)
        assert (1, {}) == (got.version, got.tensors)


@asynchronous
async def test_a_damaged_average_is_not_sent(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, strategy=FEDEL, server={"average": 0.75})
        await play(stub, [0])
        path = tmp_path / "runs" / "run" / "versions" / "000001.state.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert ("UNAVAILABLE", "damaged") == await refusal(fetch_model(stub, "run", 1, average=True))


@asynchronous
@pytest.mark.parametrize("table", ['{"average": 2}', '{"averige": 0.5}', "no table"])
async def test_settings_that_make_no_sense(tmp_path, table):
    async with aggregator(tmp_path) as (stub, _):
        header = model_header("run", FEDEL, SPEC)
        header.server_json = table
        status, reason = await refusal(push_model(stub, header, first_model()))
        assert ("INVALID_ARGUMENT", "header") == (status, reason)
