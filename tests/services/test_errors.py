"""How calls end that a server does not answer: cancelled, or refused with a status and a reason."""

import asyncio
import errno

import grpc
import pytest
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.server import serve as coordinating
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import StoreUnavailable
from fedel_services.errors import ErrorStatuses, Status, describe_call, refuse
from grpc import aio

from fedel.errors import ConfigError, ServiceError, UpdateRefused
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import connect
from fedel.wire.streams import reason_of


class Away(ServiceError):
    """An error of a service's own."""


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


NAMED = {
    "Config": (ConfigError("no action"), "INVALID_ARGUMENT", "config"),
    "Late": (UpdateRefused("late", "round 3 is closed"), "FAILED_PRECONDITION", "late"),
    "Shape": (UpdateRefused("shape", "(3, 4) is not (4, 3)"), "INVALID_ARGUMENT", "shape"),
    "Own": (Away("the database is away"), "UNAVAILABLE", "store"),
    "Base": (ServiceError("an aggregator is away"), "UNAVAILABLE", "service"),
    "Disk": (OSError(errno.ENOSPC, "No space left"), "RESOURCE_EXHAUSTED", "disk"),
    "Passing": (PermissionError(errno.EACCES, "Permission denied", "plan.pb"), "UNAVAILABLE", "io"),
    "Memory": (MemoryError("the server is out of memory"), "RESOURCE_EXHAUSTED", "memory"),
    "Bug": (KeyError("KeyError"), "INTERNAL", "internal"),
}


async def raise_named(requests, context):
    """The error that the first request names."""
    request = await anext(aiter(requests)) if hasattr(requests, "__aiter__") else requests
    describe_call(run="night")
    raise NAMED[request.decode()][0]


async def yield_then_raise(requests, context):
    yield b"first"
    await raise_named(requests, context)


HANDLERS = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(raise_named),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(yield_then_raise),
    "UnaryWrites": grpc.unary_stream_rpc_method_handler(raise_named),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(raise_named),
    "StreamStream": grpc.stream_stream_rpc_method_handler(yield_then_raise),
}


async def call(channel, method, request):
    """The answers to a call of any kind."""
    name = f"/test/{method}"
    if method == "UnaryUnary":
        return [await channel.unary_unary(name)(request)]
    if method == "StreamUnary":
        return [await channel.stream_unary(name)(iter([request]))]
    if method == "StreamStream":
        return [answer async for answer in channel.stream_stream(name)(iter([request]))]
    return [answer async for answer in channel.unary_stream(name)(request)]


@pytest.mark.parametrize("method", HANDLERS)
def test_errors_end_calls_of_every_kind(method, caplog):
    async def scenario():
        server = aio.server(interceptors=[ErrorStatuses({Away: Status(grpc.StatusCode.UNAVAILABLE, "store")})])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", HANDLERS),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name, (error, code, reason) in NAMED.items():
                with pytest.raises(aio.AioRpcError) as caught:
                    await call(channel, method, name.encode())
                assert (code, reason) == (caught.value.code().name, reason_of(caught.value))
                told = caught.value.details()
                assert all(
                    word in told for word in (error.args[1:] if isinstance(error, OSError) else error.args[-1:])
                )
        await server.stop(None)

    caplog.set_level("WARNING", "fedel_services.errors")
    asyncio.run(scenario())
    refused = [record for record in caplog.records if record.name == "fedel_services.errors"]
    assert len(NAMED) == len(refused)
    assert {(method, "night")} == {(record.method, record.run) for record in refused}


@pytest.mark.parametrize("method", ["UnaryUnary", "StreamStream"])
def test_one_traceback_for_the_same_error(method, caplog):
    async def scenario():
        server = aio.server(interceptors=[ErrorStatuses()])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", HANDLERS),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for _ in range(5):
                with pytest.raises(aio.AioRpcError, match="nobody foresaw"):
                    await call(channel, method, b"Bug")
        await server.stop(None)

    caplog.set_level("ERROR", "fedel_services.errors")
    asyncio.run(scenario())
    assert (5, 1) == (caplog.text.count("nobody foresaw"), caplog.text.count("Traceback"))


def test_long_texts_are_cut(caplog):
    huge = UpdateRefused("unknown_run", f"there is no run '{'x' * 4_000_000}\n\x1b[2J' here")

    async def scenario():
        async def refused(_request, _context):
            describe_call(run="y" * 4_000_000)
            raise huge

        server = aio.server(interceptors=[ErrorStatuses()])
        handlers = {"Long": grpc.unary_unary_rpc_method_handler(refused)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await channel.unary_unary("/test/Long")(b"")
        await server.stop(None)
        return caught.value

    caplog.set_level("WARNING", "fedel_services.errors")
    error = asyncio.run(scenario())
    assert ("NOT_FOUND", "unknown_run") == (error.code().name, reason_of(error))
    [record] = [record for record in caplog.records if record.name == "fedel_services.errors"]
    assert max(len(error.details()), len(record.getMessage())) < 1100
    assert len(record.run) < 210


class AwayStore:
    """A database that cannot be reached, once the coordinator has started."""

    def __init__(self, inner):
        self.inner, self.away = inner, False

    def __getattr__(self, name):
        if self.away and name != "close":
            raise StoreUnavailable("the database does not answer: try again")
        return getattr(self.inner, name)


def test_a_lost_database_is_unavailable(tmp_path):
    async def scenario():
        store = AwayStore(SqlStore(f"sqlite:///{tmp_path / 'coordinator.db'}"))
        config = CoordinatorConfig(listen="127.0.0.1:0")
        async with coordinating(config, store) as (address, _), connect(address) as channel:
            stub = CoordinatorServiceStub(channel)
            store.away = True
            watch = stub.WatchRun(pb.WatchRunRequest(run="night"))
            calls = [stub.ListRuns(pb.ListRunsRequest()), anext(aiter(watch))]
            calls.append(stub.ControlRun(pb.ControlRunRequest(run="night", action=pb.RUN_ACTION_STOP)))
            for one in calls:
                with pytest.raises(aio.AioRpcError) as caught:
                    await one
                assert ("UNAVAILABLE", "store") == (caught.value.code().name, reason_of(caught.value))

    asyncio.run(scenario())


READ = pb.SessionRequest.FromString
PARSED = {
    "UnaryUnary": grpc.unary_unary_rpc_method_handler(raise_named, READ),
    "UnaryStream": grpc.unary_stream_rpc_method_handler(yield_then_raise, READ),
    "StreamUnary": grpc.stream_unary_rpc_method_handler(raise_named, READ),
}


@pytest.mark.parametrize("method", PARSED)
def test_a_message_that_cannot_be_read_is_refused(method, caplog):
    async def scenario():
        server = aio.server(interceptors=[ErrorStatuses()])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", PARSED),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with connect(f"127.0.0.1:{port}") as channel:
            with pytest.raises(aio.AioRpcError) as caught:
                await call(channel, method, b"\xff")
        await server.stop(None)
        return caught.value

    error = asyncio.run(scenario())
    assert ("INVALID_ARGUMENT", "message") == (error.code().name, reason_of(error))
    assert f"a message to {method} cannot be read" in error.details()
    assert "Traceback" not in caplog.text
