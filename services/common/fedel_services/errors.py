"""How a call ends that is not answered: a gRPC status, a message that says what to do, a short reason.

Servicers raise; one interceptor turns what they raise into a status. Each class of error has one status, in
``STATUSES`` or in the table that a service adds for its own classes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from fedel import errors, request_id
from fedel.roles.gate import MAX_NAME, clean
from fedel.wire.streams import REASON
from fedel_services.handlers import behaviour_of, with_behaviour
from fedel_services.rates import LimitedLog

log = logging.getLogger(__name__)
Code = grpc.StatusCode


class UnreadableMessage(errors.FedelError):
    """A request that is not the message it should be."""


class Status(NamedTuple):
    code: grpc.StatusCode
    reason: str
    """One word, for scripts and metrics; travels as trailing metadata."""


Statuses = Mapping[type[errors.FedelError], Status]
STATUSES: Statuses = {
    errors.ConfigError: Status(Code.INVALID_ARGUMENT, "config"),
    errors.DataError: Status(Code.INVALID_ARGUMENT, "data"),
    errors.ModelError: Status(Code.INVALID_ARGUMENT, "model"),
    errors.ProfileError: Status(Code.INVALID_ARGUMENT, "profile"),
    errors.CertificateError: Status(Code.INVALID_ARGUMENT, "certificate"),
    errors.ServiceError: Status(Code.UNAVAILABLE, "service"),
    UnreadableMessage: Status(Code.INVALID_ARGUMENT, "message"),
    errors.FedelError: Status(Code.INTERNAL, "internal"),
}
"""A class that is not here has the status of its nearest base class that is."""
UPDATE_CODES: Mapping[str, grpc.StatusCode] = {
    "checksum": Code.DATA_LOSS,
    "conflict": Code.ALREADY_EXISTS,
    "late": Code.FAILED_PRECONDITION,
    "early": Code.FAILED_PRECONDITION,
    "other_round": Code.FAILED_PRECONDITION,
    "missing": Code.FAILED_PRECONDITION,
    "empty": Code.FAILED_PRECONDITION,
    "ended": Code.FAILED_PRECONDITION,
    "unplanned": Code.FAILED_PRECONDITION,
    "unknown_run": Code.NOT_FOUND,
    "unknown_version": Code.NOT_FOUND,
    "superseded": Code.ABORTED,
    "sealed": Code.UNAVAILABLE,
    "not_open": Code.UNAVAILABLE,
    "starting": Code.UNAVAILABLE,
    "idle": Code.DEADLINE_EXCEEDED,
    "slow": Code.DEADLINE_EXCEEDED,
}
"""``UpdateRefused`` brings its reason; one that is not here is the caller's mistake: INVALID_ARGUMENT."""
DISK_FULL = Status(Code.RESOURCE_EXHAUSTED, "disk")
NO_MEMORY = Status(Code.RESOURCE_EXHAUSTED, "memory")
FILE_ERROR = Status(Code.UNAVAILABLE, "io")
"""Other errors of the system: no permission, no descriptors, a bad disk. They pass, so callers try again."""
UNFORESEEN = Status(Code.INTERNAL, "internal")
TRACEBACK_SECONDS = 60.0
"""An unforeseen error that comes again from the same place has its traceback in the log once in this time."""
_CALL_FIELDS: ContextVar[dict[str, Any]] = ContextVar("call_fields")


async def refuse(
    context: aio.ServicerContext[Any, Any], code: grpc.StatusCode, message: str, reason: str = ""
) -> NoReturn:
    """End a call with an error that says what to do."""
    if reason:
        context.set_trailing_metadata(((REASON, reason),))
    try:
        await context.abort(code, message)
    except aio.InternalError:
        # The caller has gone. Left to asyncio, this would be a traceback in the log for each that hangs up.
        raise asyncio.CancelledError from None


def describe_call(**fields: Any) -> None:
    """Add fields (``run``, ``round``, ``client``) to the log line of this call, should it be refused."""
    shown = {key: clean(value, MAX_NAME) if isinstance(value, str) else value for key, value in fields.items()}
    _CALL_FIELDS.get({}).update(shown)


def _text(error: Exception, status: Status) -> str:
    """What the caller is told; bounded and on one line, because it may quote what the caller sent."""
    if isinstance(error, OSError):
        file = f"'{error.filename}'" if error.filename else "a file"
        cause = error.strerror or type(error).__name__
        if status == DISK_FULL:
            return clean(f"the server's disk is full ({file}: {cause}): free space there, then try again")
        return clean(f"the server cannot use {file}: {cause}; mend that there, then try again")
    if status == NO_MEMORY:
        return "the server is out of memory: try again when it has less to do, or give it more"
    if status == UNFORESEEN and not isinstance(error, errors.FedelError):
        return clean(
            f"the server met an error that nobody foresaw ({type(error).__name__}); its log has more,"
            f" with the request {request_id.current()}"
        )
    return clean(str(error))


def _place(error: Exception) -> tuple[str, int]:
    """File and line that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)


class ErrorStatuses(aio.ServerInterceptor):
    """Ends a call whose servicer raised an error with the error's status."""

    def __init__(self, own: Statuses | None = None) -> None:
        self._statuses = {**STATUSES, **(own or {})}
        self._lines = LimitedLog(log)
        self._tracebacks: dict[tuple[str, int], float] = {}
        """When the traceback of an unforeseen error was last logged, by the line that raised it."""

    def status_of(self, error: Exception) -> Status:
        if isinstance(error, errors.VersionRefused):
            return Status(Code.FAILED_PRECONDITION, error.reason)
        if isinstance(error, errors.UpdateRefused):
            return Status(UPDATE_CODES.get(error.reason, Code.INVALID_ARGUMENT), error.reason)
        if isinstance(error, errors.FedelError):
            return next(self._statuses[kind] for kind in type(error).__mro__ if kind in self._statuses)
        if isinstance(error, OSError):
            return DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else FILE_ERROR
        return NO_MEMORY if isinstance(error, MemoryError) else UNFORESEEN

    def _log(self, error: Exception, status: Status, message: str, fields: Mapping[str, Any]) -> None:
        about = {"reason": status.reason, **fields}
        if status != UNFORESEEN or isinstance(error, errors.FedelError):
            self._lines.write(logging.WARNING, f"refused: {message}", about)
            return
        place, now = _place(error), time.monotonic()
        is_new = now - self._tracebacks.get(place, -TRACEBACK_SECONDS) >= TRACEBACK_SECONDS
        if is_new:
            self._tracebacks[place] = now
            log.error("failed: %s", message, extra=about, exc_info=error)
        else:
            self._lines.write(logging.ERROR, f"failed: {message}", about)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        behaviour, method = behaviour_of(handler), details.method.rpartition("/")[2]

        async def answer(request: Any, context: Any) -> Any:
            fields: dict[str, Any] = {"method": method, "peer": context.peer()}
            _CALL_FIELDS.set(fields)
            try:
                if isinstance(request, UnreadableMessage):
                    raise request
                return await behaviour(request, context)
            except aio.AbortError:
                raise
            except (aio.UsageError, aio.InternalError) as error:
                # gRPC says so where an answer, or the end of a call, meets a caller that has just hung up.
                self._lines.write(logging.INFO, f"the caller hung up: {type(error).__name__}", fields)
                raise asyncio.CancelledError from None
            except Exception as error:
                status = self.status_of(error)
                message = _text(error, status)
                self._log(error, status, message, fields)
                await refuse(context, status.code, message, status.reason)

        return with_behaviour(handler, answer, _parser(handler, method))


def _parser(handler: Any, method: str) -> Callable[[bytes], Any] | None:
    """The parser of a handler's requests; what it cannot read ends the call as any refusal does.

    gRPC parses a single request before any of our code runs, so there the error takes the request's place. In a
    stream it is raised where the servicer reads.
    """
    parse = handler.request_deserializer
    if parse is None:
        return None

    def parsed(message: bytes) -> Any:
        try:
            return parse(message)
        except DecodeError:
            error = UnreadableMessage(
                f"a message to {method} cannot be read: send it as the protos of this version say"
            )
        if handler.request_streaming:
            raise error
        return error

    return parsed
