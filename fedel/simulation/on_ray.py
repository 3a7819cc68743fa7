"""Workers on Ray: for simulations that are larger than one machine."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from fedel.errors import ConfigError
from fedel.simulation.children import Failure
from fedel.simulation.workers import Worker
from fedel.types import Array, Tensors


class _Actor:
    """A worker in one of Ray's processes; the data set is in Ray's shared memory, once per machine."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._model: dict[str, Array] = {}
        worker.workload.prepare()

    def publish(self, changed: Tensors) -> None:
        self._model.update(changed)

    def perform(self, item: Any) -> Any:
        try:
            return self._worker.perform(item, self._model)
        except Exception as error:
            return Failure.of(error)


class OnRay:
    """One actor per worker, on the cluster that Ray finds (``RAY_ADDRESS``), or on this machine."""

    def __init__(self, worker: Worker, num_workers: int) -> None:
        try:
            import ray  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            raise ConfigError("--executor ray needs Ray: pip install 'fedel[ray]', or use processes") from None
        self._ray = ray
        self._own = not ray.is_initialized()
        if self._own:
            # The size of an existing cluster is not ours to set.
            local = (
                {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": num_workers, "include_dashboard": False}
            )
            # Ray would add a handler of its own, which writes to a stream that may be closed later.
            ray.init(log_to_driver=False, configure_logging=False, **local)
        shared = ray.put(worker)
        actor = ray.remote(num_cpus=1)(_Actor)
        self._actors = [actor.remote(shared) for _ in range(num_workers)]

    def publish(self, changed: Tensors) -> None:
        values = self._ray.put(dict(changed))
        self._ray.get([actor.publish.remote(values) for actor in self._actors])

    def run(self, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        todo = deque(enumerate(items))
        busy: dict[Any, tuple[Any, int]] = {}

        def give(actor: Any) -> None:
            if todo:
                place, item = todo.popleft()
                busy[actor.perform.remote(item)] = actor, place

        for actor in self._actors:
            give(actor)
        while busy:
            (done,), _ = self._ray.wait(list(busy), num_returns=1)
            actor, place = busy.pop(done)
            result = self._ray.get(done)
            if isinstance(result, Failure):
                raise result.error()
            give(actor)
            yield place, result

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        if self._own:
            self._ray.shutdown()
