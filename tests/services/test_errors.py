"""How calls end that a server does not answer: cancelled, or refused with a status and a reason."""

import asyncio

import grpc
import pytest
from fedel_services.errors import refuse
from grpc import aio


class SlowContext:
    """A call whose client is slow to take the status: real contexts give no hold on that moment."""

    def __init__(self):
        self.aborting, self.released = asyncio.Event(), asyncio.Event()
        self.metadata = ()

    def set_trailing_metadata(self, metadata):
        self.metadata = metadata

    async def abort(self, code, message):
        self.aborting.set()
        await self.released.wait()
        raise aio.AbortError(f"{code}: {message}")


async def refused_call(context, done):
    await refuse(context, grpc.StatusCode.NOT_FOUND, "there is no such run", "unknown_run")
    done.append("went on")


def test_cancelled_during_a_refusal():
    async def scenario():
        context, done = SlowContext(), []
        call = asyncio.create_task(refused_call(context, done))
        await context.aborting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [] == done

    asyncio.run(scenario())


def test_nothing_runs_after_a_refusal():
    async def scenario():
        context, done = SlowContext(), []
        context.released.set()
        with pytest.raises(aio.AbortError):
            await refused_call(context, done)
        assert ([], (("fedel-reason", "unknown_run"),)) == (done, context.metadata)

    asyncio.run(scenario())
