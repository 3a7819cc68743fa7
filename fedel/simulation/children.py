"""Processes forked from this one: they inherit what they need, so that nothing large is sent to them."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fedel.errors import ConfigError, FedelError, ServiceError, UpdateRefused


@dataclass(frozen=True)
class Failure:
    """An error on its way to the process that started the worker."""

    kind: type[FedelError] | None
    text: str

    @staticmethod
    def of(error: Exception) -> Failure:
        if isinstance(error, FedelError) and not isinstance(error, UpdateRefused):
            return Failure(type(error), str(error))
        return Failure(None, "".join(traceback.format_exception(error)))

    def error(self) -> FedelError:
        if self.kind is not None:
            return self.kind(self.text)
        return ServiceError(
            f"a worker failed:\n{self.text.rstrip()}\nThis is a defect in FedEL or in your own code"
        )


def fork(target: Callable[..., None], words: tuple[Any, ...], name: str, *, daemon: bool = True) -> BaseProcess:
    """Start a process that inherits everything; one that is no daemon can have processes of its own."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigError("this system cannot fork processes; use --executor serial, or ray")
    process: BaseProcess = multiprocessing.get_context("fork").Process(
        target=_run, args=(target, words), daemon=daemon, name=name
    )
    collects = gc.isenabled()
    gc.disable()  # the child keeps its parent's garbage from its very first line on
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns about forking a process with threads: none of ours holds a lock here.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        if collects:
            gc.enable()
    return process


def _run(target: Callable[..., None], words: tuple[Any, ...]) -> None:
    # What the parent left over is not for a child to collect: a channel of gRPC waits for threads while it is
    # deleted, and those are only in the parent.
    gc.freeze()
    gc.enable()
    target(*words)


class Child:
    """A process forked from this one that answers requests; everything else it inherits."""

    def __init__(self, answer: Callable[[Any], Any], inherited: Iterable[Connection] = ()) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        # A child that kept its parent's ends of the pipes would never see that the parent is gone.
        unwanted = (*inherited, self.connection)
        self._process = fork(_serve, (theirs, answer, unwanted), "fedel-worker")
        theirs.close()

    def send(self, request: Any) -> None:
        self.connection.send(request)

    def receive(self) -> Any:
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise ServiceError(
                f"a worker process ended by itself (exit code {self._process.exitcode}); with code -9 the "
                "machine was out of memory: use fewer --workers"
            ) from None
        if isinstance(answer, Failure):
            raise answer.error()
        return answer

    def end(self) -> None:
        self._process.terminate()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, answer: Callable[[Any], Any], unwanted: Iterable[Connection]) -> None:
    # Ctrl-C reaches the whole group of processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in unwanted:
        other.close()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            reply = answer(request)
        except Exception as error:
            reply = Failure.of(error)
        try:
            connection.send(reply)
        except BrokenPipeError:
            return
