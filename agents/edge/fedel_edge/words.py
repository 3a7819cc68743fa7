"""What an agent says about its work: to the coordinator, and to its log."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping

from grpc import aio

from fedel.errors import FedelError
from fedel.roles.gate import clean, clean_lines
from fedel.v1 import coordinator_pb2
from fedel.v1.coordinator_pb2 import SessionRequest
from fedel.wire.streams import reason_of

_log = logging.getLogger(__name__)


def failure(error: Exception, run: str, round_num: int, about: Mapping[str, object]) -> SessionRequest:
    """The message for the coordinator, which is logged too; an error that nobody foresaw with its trace.

    ``about`` are the fields of the log line.
    """
    message = str(error)
    if isinstance(error, aio.AioRpcError):
        message = f"{reason_of(error) or error.code().name.lower()}: {error.details()}"
    elif not isinstance(error, FedelError):
        message = f"{type(error).__name__}: {error}"
    foreseen = isinstance(error, aio.AioRpcError | FedelError)
    message = clean(message)
    _log.error("%s", message, exc_info=None if foreseen else error, extra=dict(about))
    # What a server answered says all; of anything else, the operator can see where it happened.
    trace = "" if isinstance(error, aio.AioRpcError) else "".join(traceback.format_exception(error))
    failed = coordinator_pb2.TaskFailed(run=run, round_num=round_num, message=message, trace=clean_lines(trace))
    return SessionRequest(failed=failed)


def refusal_in(message: SessionRequest) -> str:
    return message.answer.reason if message.HasField("answer") else message.failed.message


def phase_of(number: int) -> str:
    known = coordinator_pb2.RunPhase.values()
    name = coordinator_pb2.RunPhase.Name(coordinator_pb2.RunPhase.ValueType(number)) if number in known else ""
    return name.removeprefix("RUN_PHASE_").lower() or f"phase {number}"


def line_of(done: coordinator_pb2.TaskDone) -> str:
    report, window = done.report, done.report.window
    blocks = f"blocks {window.end_block}-{window.front_block}, " if window.front_block else ""
    return (
        f"round {report.round_num}: {blocks}loss {report.loss:.4f}, {report.train_seconds:.2f} s of training, "
        f"{done.bytes_up / 1e6:.2f} MB up, {done.bytes_down / 1e6:.2f} MB down"
    )
