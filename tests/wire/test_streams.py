"""The caller's side of the streams against aggregators that do not do what they should."""

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from grpc import aio

from fedel.errors import ServiceError
from fedel.types import Patch, Report
from fedel.v1 import aggregator_pb2 as pb
from fedel.v1 import aggregator_pb2_grpc
from fedel.wire.channel import connect
from fedel.wire.payload import pack
from fedel.wire.streams import fetch_model, push_update

VALUES = np.arange(10, dtype=np.float32)
PAYLOAD = pack({"w": Patch(VALUES)})


class Lying(aggregator_pb2_grpc.AggregatorServiceServicer):
    """Sends what it is told to send."""

    def __init__(self, answers):
        self._answers = answers

    async def GetModel(self, request, context):
        for answer in self._answers:
            yield answer

    async def PutUpdate(self, request_iterator, context):
        await context.read()
        for answer in self._answers:
            yield answer

    CreateModel = OpenRound = SealRound = CommitRound = KeepVersion = None


@asynccontextmanager
async def lying(answers):
    server = aio.server()
    aggregator_pb2_grpc.add_AggregatorServiceServicer_to_server(Lying(answers), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        yield aggregator_pb2_grpc.AggregatorServiceStub(channel)
    await server.stop(None)


def content():
    return pb.GetModelResponse(content=pb.ModelContent(version=3, tensors=PAYLOAD.manifest))


def piece(offset, data):
    return pb.GetModelResponse(chunk={"offset": offset, "data": data})


async def fetch_from(answers):
    async with lying(answers) as stub:
        return await fetch_model(stub, "run")


def test_pieces_may_end_anywhere():
    data = VALUES.tobytes()
    fetched = asyncio.run(
        fetch_from([content(), piece(0, data[:3]), piece(3, data[3:17]), piece(17, data[17:])])
    )
    assert (3, 40) == (fetched.version, fetched.num_bytes)
    assert VALUES.tolist() == fetched.tensors["w"].tolist()


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([(0, VALUES.tobytes()[:20])], "breaks off at byte 20"),
        ([(0, VALUES.tobytes()[:20]), (24, VALUES.tobytes()[24:])], "breaks off at byte 20"),
        ([(0, b"\1" + VALUES.tobytes()[1:])], "'w' was damaged"),
        ([(0, VALUES.tobytes()), (40, b"more")], "more than it announced"),
    ],
)
def test_a_model_that_is_not_what_was_announced_is_not_taken(pieces, words):
    with pytest.raises(ServiceError, match=words):
        asyncio.run(fetch_from([content(), *(piece(*p) for p in pieces)]))


def test_an_aggregator_that_says_nothing_is_no_answer():
    async def push():
        async with lying([]) as stub:
            await push_update(stub, "run", Report("a", 0, 1, 1, 1.0, 0.5), PAYLOAD)

    with pytest.raises(ServiceError, match="sent nothing"):
        asyncio.run(fetch_from([]))
    with pytest.raises(ServiceError, match="without an answer"):
        asyncio.run(push())
