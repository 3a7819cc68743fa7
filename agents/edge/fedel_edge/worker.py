"""A thread for what keeps a core or a disk busy, so that the event loop never is."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Runs functions one after the other. Its thread does not keep the process from ending."""

    def __init__(self, name: str = "worker") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Guards the number of jobs, which both threads change."""
        self._num_jobs = 0
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a function is running or waiting."""
        with self._lock:
            return self._num_jobs > 0

    def run(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a function at once. Cancelling the future forgets the result; the function still runs."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._num_jobs += 1
        self._jobs.put((function, future))
        return future

    def _loop(self) -> None:
        while True:
            function, future = self._jobs.get()
            loop, result, error = future.get_loop(), None, None
            try:
                result = function()
            except BaseException as problem:
                error = _fit_for_a_future(problem)
            with self._lock:
                self._num_jobs -= 1
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the agent has ended without waiting
            del function, future, result, error


def _fit_for_a_future(problem: BaseException) -> Exception:
    """A user's code may raise anything. SystemExit and KeyboardInterrupt would end the event loop,
    CancelledError would look like a task that was given up, and a future does not accept StopIteration."""
    if isinstance(problem, Exception) and not isinstance(problem, StopIteration):
        return problem
    what = f"{type(problem).__name__}: {problem}" if str(problem) else type(problem).__name__
    wrapped = RuntimeError(f"the code that was called raised {what}")
    wrapped.__cause__ = problem
    return wrapped


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
