"""One thread for everything that keeps a core busy, so that the event loop never does."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Runs functions one after the other. Its thread does not keep the process from ending."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]]] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=self._loop, name="worker", daemon=True).start()

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    async def run(self, function: Callable[[], T]) -> T:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._idle.clear()
        self._jobs.put((function, future))
        return await future

    def _loop(self) -> None:
        while True:
            function, future = self._jobs.get()
            loop = future.get_loop()
            try:
                result, error = function(), None
            except Exception as problem:
                result, error = None, problem
            if self._jobs.empty():
                self._idle.set()
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the agent has ended without waiting
            del function, future, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
