"""Where tasks run: in this process, or in several on this machine. The first to finish comes first."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np

from fedel.simulation.children import Child
from fedel.simulation.workers import ClientTask, Outcome, Together, Worker
from fedel.types import Array, ModelSpec, Tensors

_ALIGNMENT = 64


class Executor(Protocol):
    def publish(self, changed: Tensors) -> None:
        """New values of the model's tensors; the first time all of them."""
        ...

    def run(self, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The place of each item and its result, in the order in which they finish."""
        ...

    def close(self) -> None: ...


def outcomes(
    executor: Executor, tasks: Sequence[ClientTask], num_together: int, kind: Callable[[ClientTask], Any]
) -> Iterator[Outcome]:
    """Of all tasks, as they finish. Up to ``num_together`` of the same ``kind`` go to a worker at once."""
    if num_together == 1:
        yield from (outcome for _, outcome in executor.run(tasks))
        return
    tasks = sorted(tasks, key=kind)
    groups = [Together(tuple(tasks[i : i + num_together])) for i in range(0, len(tasks), num_together)]
    for _, several in executor.run(groups):
        yield from several


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Serial:
    """Everything in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._model: dict[str, Array] = {}
        worker.workload.prepare()

    def publish(self, changed: Tensors) -> None:
        self._model.update(changed)

    def run(self, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        for place, item in enumerate(items):
            yield place, self._worker.perform(item, self._model)

    def close(self) -> None:
        self._model.clear()


class SharedModel:
    """The model in memory that a process shares with its children: written once, read by all."""

    def __init__(self, spec: ModelSpec) -> None:
        sizes = [t.num_bytes for t in spec.tensors]
        starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
        memory = mmap.mmap(-1, max(1, starts[-1]))
        self._places: dict[str, Array] = {
            t.name: np.frombuffer(memory, t.dtype, t.size, start).reshape(t.shape)
            for t, start in zip(spec.tensors, starts, strict=False)
        }
        self.tensors: Mapping[str, Array] = {name: place.view() for name, place in self._places.items()}
        """Read-only."""
        for values in self.tensors.values():
            values.flags.writeable = False

    def write(self, changed: Tensors) -> None:
        for name, values in changed.items():
            np.copyto(self._places[name], values)


class Processes:
    """Workers forked from this process: they share its data set, and the model through shared memory."""

    def __init__(self, worker: Worker, num_workers: int) -> None:
        self._shared = SharedModel(worker.workload.spec)
        self._children: list[Child] = []
        for _ in range(num_workers):
            others = [child.connection for child in self._children]
            self._children.append(Child(_Answers(worker, self._shared.tensors), others))

    def publish(self, changed: Tensors) -> None:
        self._shared.write(changed)

    def run(self, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        todo = deque(enumerate(items))
        busy: dict[Connection, tuple[Child, int]] = {}

        def give(child: Child) -> None:
            if todo:
                place, item = todo.popleft()
                child.send(item)
                busy[child.connection] = child, place

        for child in self._children:
            give(child)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                child, place = busy.pop(connection)
                result = child.receive()
                give(child)
                yield place, result

    def close(self) -> None:
        for child in self._children:
            child.end()
        self._children.clear()


class _Answers:
    def __init__(self, worker: Worker, model: Tensors) -> None:
        self._worker, self._model, self._prepared = worker, model, False

    def __call__(self, item: Any) -> Any:
        if not self._prepared:
            self._worker.workload.prepare()
            self._prepared = True
        return self._worker.perform(item, self._model)
