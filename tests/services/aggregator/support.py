"""A small uneven model, updates of it, and a real aggregator on a free port."""

import asyncio
import functools
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve
from grpc import aio

from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.types import ModelSpec, Patch, Report, Role, TensorSpec, Update, Window
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.model_pb2 import Chunk
from fedel.wire.channel import connect
from fedel.wire.codec import report_to_pb
from fedel.wire.payload import pack
from fedel.wire.streams import model_header, push_model, push_update, reason_of

SPEC = ModelSpec(
    "toy",
    ("one", "two", "three"),
    (
        TensorSpec("one.weight", 1, (4, 3)),
        TensorSpec("one.mean", 1, (4,), Role.BUFFER),
        TensorSpec("two.weight", 2, (700, 500)),
        TensorSpec("two.exit", 2, (5, 7), Role.EXIT),
        TensorSpec("three.weight", 3, (11,)),
    ),
)
FEDAVG = {"name": "fedavg", "weighting": "samples"}


def asynchronous(test):
    """Let pytest run a coroutine."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


def first_model(seed=0):
    rng = np.random.default_rng(seed)
    return {t.name: rng.normal(0, 0.1, t.shape).astype(np.float32) for t in SPEC.tensors}


CLIENTS = "abcdefgx"


def samples_of(client):
    return 1 + sum(client.encode()) * 37 % 499


def make_update(client, round_num=0, names=None, seed=0, num_samples=None):
    """Values, samples and steps differ from client to client."""
    rng = np.random.default_rng([seed, round_num, *client.encode()])
    patches = {
        t.name: Patch(rng.normal(0, 0.1, t.shape).astype(np.float32))
        for t in SPEC.tensors
        if names is None or t.name in names
    }
    samples = samples_of(client) if num_samples is None else num_samples
    report = Report(
        client,
        round_num,
        samples,
        7,
        float(rng.integers(1, 50)),
        loss=0.5,
        window=Window(1, 2),
        selected=("one.weight",),
    )
    return Update(patches, report)


def header_of(update, run="run"):
    payload = pack(update.patches)
    return pb.UpdateHeader(
        run=run, report=report_to_pb(update.report), tensors=payload.manifest, digest=payload.digest
    )


def fold_directly(updates, model, strategy=FEDAVG, state=None, spec=SPEC):
    fold = RoundFold(build(strategy), spec)
    for update in updates:
        fold.add(update)
    return fold.finish(model, state or {})


def late_as(update, weight, started, present):
    """A late update as it counts: the present values, and ``weight`` times the change since ``started``; of
    statistics the change since the present ones."""
    patches = {}
    for name, patch in update.patches.items():
        now = present[name].astype(np.float64)
        before = now if SPEC.by_name[name].role is Role.BUFFER else started[name]
        patches[name] = Patch((now + weight * (patch.values.astype(np.float64) - before)).astype(np.float32))
    return replace(update, patches=patches)


def bits(tensors):
    return {name: values.tobytes() for name, values in tensors.items()}


@asynccontextmanager
async def aggregator(folder, **settings):
    """Stub and servicer of an aggregator over this folder."""
    config = AggregatorConfig(listen="127.0.0.1:0", data_dir=folder, **settings)
    async with serve(config) as (address, servicer), connect(address) as channel:
        yield AggregatorServiceStub(channel), servicer


def metric(servicer, name, **labels):
    """A sample of the aggregator's Prometheus registry."""
    return servicer.registry.get_sample_value(name, labels)


def refusals(servicer):
    """How many uploads were refused, by reason."""
    return {
        sample.labels["reason"]: sample.value
        for family in servicer.registry.collect()
        for sample in family.samples
        if sample.name == "fedel_uploads_refused_total" and sample.value
    }


async def create(stub, model=None, strategy=FEDAVG, run="run", **options):
    """A run whose first round is open for every client of the tests."""
    answer = await push_model(stub, model_header(run, strategy, SPEC, **options), model or first_model())
    await open_round(stub, 0, run=run)
    return answer


async def open_round(stub, round_num, clients=CLIENTS, run="run", oldest=1):
    """Open a round for clients with a task of it or of one of the ``oldest`` rounds before."""
    participants = [
        pb.Participant(
            client=client,
            round_num=number,
            num_samples=samples_of(client),
            max_steps=10,
            max_effective_steps=100,
        )
        for client in clients
        for number in range(round_num - oldest, round_num + 1)
    ]
    await stub.OpenRound(pb.OpenRoundRequest(run=run, round_num=round_num, participants=participants))


async def seal(stub, round_num, run="run"):
    """The reports of a round, which takes no further update."""
    answers = stub.SealRound(pb.SealRoundRequest(run=run, round_num=round_num))
    return [report async for answer in answers for report in answer.reports]


async def send(stub, update, run="run"):
    return await push_update(stub, run, update.report, pack(update.patches))


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


async def close(stub, round_num, clients=None, run="run", oldest=1):
    """Seal and commit, by default with all updates that are in, and open the next round."""
    reports = await seal(stub, round_num, run)
    names = [r.client for r in reports] if clients is None else clients
    answer = await stub.CommitRound(pb.CommitRoundRequest(run=run, round_num=round_num, clients=names))
    await open_round(stub, round_num + 1, run=run, oldest=oldest)
    return answer


async def refusal(awaitable):
    """Status and reason of a call that must fail."""
    with pytest.raises(aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code().name, reason_of(caught.value)
