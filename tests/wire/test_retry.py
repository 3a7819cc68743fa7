from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc import aio

from fedel.wire.retry import Backoff, backoff_seconds, describe, is_transient, retrying


def error_of(code: grpc.StatusCode, details: str = "") -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details)


AWAY = error_of(grpc.StatusCode.UNAVAILABLE, "away")
REFUSED = error_of(grpc.StatusCode.NOT_FOUND, "no such run")


class Script:
    """An attempt that ends in each of these ways in turn, and a sleep that only writes down how long."""

    def __init__(self, *ways: Exception | str) -> None:
        self.ways = list(ways)
        self.slept: list[float] = []

    async def attempt(self) -> str:
        way = self.ways.pop(0)
        if isinstance(way, Exception):
            raise way
        return way

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_success_after_failures() -> None:
    script, seen = Script(AWAY, AWAY, "done"), []
    answer = asyncio.run(
        retrying(script.attempt, on_failure=lambda error, n: seen.append((error, n)), sleep=script.sleep)
    )
    assert ("done", [(AWAY, 1), (AWAY, 2)]) == (answer, seen)
    first, second = script.slept
    assert 0.1 <= first <= 0.2
    assert 0.2 <= second <= 0.4


def test_refusal_is_raised_at_once() -> None:
    script = Script(AWAY, REFUSED, "never")
    with pytest.raises(aio.AioRpcError, match="no such run"):
        asyncio.run(retrying(script.attempt, sleep=script.sleep))
    assert (["never"], 1) == (script.ways, len(script.slept))


def test_own_choice_of_errors() -> None:
    script = Script(ValueError("damaged"), "done")
    asyncio.run(
        retrying(script.attempt, retried=lambda error: isinstance(error, ValueError), sleep=script.sleep)
    )
    assert [] == script.ways


def test_giving_up() -> None:
    class Stopped(Exception):
        pass

    def stop(error: Exception, failures: int) -> None:
        if failures == 3:
            raise Stopped

    script = Script(*[AWAY] * 9)
    with pytest.raises(Stopped):
        asyncio.run(retrying(script.attempt, on_failure=stop, sleep=script.sleep))
    assert 2 == len(script.slept)


def test_reset_after_progress() -> None:
    script, backoff = Script(AWAY, AWAY, AWAY, AWAY, "done"), Backoff(longest_seconds=1.0)

    def progress(error: Exception, failures: int) -> None:
        if len(script.ways) == 2:
            backoff.reset()

    asyncio.run(retrying(script.attempt, on_failure=progress, backoff=backoff, sleep=script.sleep))
    assert 0.2 < script.slept[1]
    assert max(script.slept[2:]) <= 0.2
    assert 1 == backoff.failures


@pytest.mark.parametrize("failures", [0, 1, 5, 10_000])
def test_wait_is_bounded(failures: int) -> None:
    assert 0 < Backoff(longest_seconds=5.0, failures=failures).seconds <= 5.0
    assert backoff_seconds(failures) <= 30.0


def test_what_is_transient() -> None:
    assert [True, False, False] == [is_transient(e) for e in (AWAY, REFUSED, ValueError())]


def test_a_call_that_a_stopping_server_ends_is_worth_another_try() -> None:
    async def ended_by_the_server() -> Exception:
        begun = asyncio.Event()

        async def wait(request: bytes, context: aio.ServicerContext) -> bytes:
            begun.set()
            await asyncio.Event().wait()
            return b""

        server = aio.server()
        handlers = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = asyncio.ensure_future(_called(channel))
            await begun.wait()
            await server.stop(grace=None)
            return await call

    error = asyncio.run(ended_by_the_server())
    assert isinstance(error, aio.AioRpcError)
    assert is_transient(error), error


async def _called(channel: aio.Channel) -> Exception:
    try:
        await channel.unary_unary("/test.Test/Wait")(b"")
    except aio.AioRpcError as error:
        return error
    raise AssertionError("the server answered")


def test_description() -> None:
    nameless = error_of(grpc.StatusCode.UNAVAILABLE)
    assert ["away", "UNAVAILABLE", "odd"] == [describe(e) for e in (AWAY, nameless, ValueError("odd"))]
