"""One order of the coordinator, from its arrival to its answer: fetch the model, train or test, send."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fedel.roles.edge import run_task
from fedel.types import Tensors, Window
from fedel.v1 import aggregator_pb2, coordinator_pb2, task_pb2
from fedel.wire.codec import memory_from_pb, report_to_pb, task_from_pb, window_to_pb
from fedel.wire.payload import pack
from fedel_edge import device
from fedel_edge.runs import Run
from fedel_edge.slow import Abandoned, PacedTrainer, WatchedTrainer
from fedel_edge.state import Parcel
from fedel_edge.transfer import download, upload
from fedel_edge.worker import Worker

T = TypeVar("T")
Send = Callable[[coordinator_pb2.SessionRequest], None]


class Order:
    """Work that the coordinator asked for, until it is done or nobody wants it any more."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        """Round of a task, version of an evaluation."""
        self.phase = ""
        self.outcome: coordinator_pb2.SessionRequest | None = None
        """What was answered, to be said again if it is asked again."""
        self.given_up = threading.Event()
        self._signal, self._settled = asyncio.Event(), asyncio.Event()

    def give_up(self) -> None:
        self.given_up.set()
        self._signal.set()

    def settle(self, outcome: coordinator_pb2.SessionRequest | None) -> None:
        self.outcome = outcome
        self._settled.set()

    async def finished(self, timeout_seconds: float) -> None:
        """Until it is settled, for so long at most."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), timeout_seconds)

    async def unless_given_up(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``; ``Abandoned``, and the work cancelled, as soon as the order is given up."""
        task, signal = asyncio.ensure_future(work), asyncio.ensure_future(self._signal.wait())
        try:
            await asyncio.wait({task, signal}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Abandoned
            return task.result()
        finally:
            signal.cancel()
            task.cancel()
            await asyncio.wait({task})


@dataclass(frozen=True)
class Workbench:
    """What orders are carried out with."""

    worker: Worker
    send: Send
    slowdown: float = 1.0
    clock: Callable[[], float] = time.perf_counter
    """Measures what keeps the trainer busy."""
    root: Path = Path("/")
    """Where the device's file system starts."""

    async def train(self, order: Order, task: task_pb2.Task) -> coordinator_pb2.TaskDone:
        """Carry out a task. An update that waits on disk from before a restart is only sent."""
        run, phases = order.run, coordinator_pb2.PhaseSeconds()
        made = await self.worker.run(partial(run.folder.outbox.get, task.round_num))
        parcel, usage, bytes_down = (
            (made, device.Usage(), 0) if made is not None else await self._make(order, task, phases)
        )
        begin = self._enter(order, task, "upload")
        sent = await order.unless_given_up(upload(run, parcel))
        phases.wait = sent.wait_seconds
        phases.upload = time.monotonic() - begin - sent.wait_seconds
        return coordinator_pb2.TaskDone(
            run=run.name,
            report=parcel.header.report,
            phases=phases,
            bytes_up=sent.num_bytes,
            bytes_down=bytes_down,
            device=_device_state(usage),
        )

    async def _make(
        self, order: Order, task: task_pb2.Task, phases: coordinator_pb2.PhaseSeconds
    ) -> tuple[Parcel, device.Usage, int]:
        begin = self._enter(order, task, "download")
        model, bytes_down = await order.unless_given_up(download(order.run, task.model_version, self.worker))
        phases.download = time.monotonic() - begin
        begin = self._enter(order, task, "train")
        fit = partial(self._fit, order, task, model, asyncio.get_running_loop())
        parcel, usage = await order.unless_given_up(self.worker.run(fit))
        phases.train = time.monotonic() - begin
        return parcel, usage, bytes_down

    def _enter(self, order: Order, task: task_pb2.Task, phase: str) -> float:
        if order.given_up.is_set():
            raise Abandoned
        order.phase = phase
        self._tell(task, phase)
        return time.monotonic()

    def _tell(
        self,
        task: task_pb2.Task,
        phase: str,
        window: task_pb2.WindowState | None = None,
        planned_seconds: float = 0.0,
    ) -> None:
        progress = coordinator_pb2.TaskProgress(
            run=task.run,
            round_num=task.round_num,
            phase=phase,
            window=window,
            planned_seconds=planned_seconds,
        )
        self.send(coordinator_pb2.SessionRequest(progress=progress))

    def _fit(
        self, order: Order, message: task_pb2.Task, model: Tensors, loop: asyncio.AbstractEventLoop
    ) -> tuple[Parcel, device.Usage]:
        """In the worker's thread: train, and put the update where a power cut does not reach it."""
        run = order.run

        def on_train(window: Window, selected: tuple[str, ...], seconds: float) -> None:
            state = window_to_pb(window, 0, 0, selected)
            loop.call_soon_threadsafe(self._tell, message, "train", state, seconds)

        paced = PacedTrainer(run.trainer, self.slowdown, order.given_up, self.clock)
        trainer = WatchedTrainer(paced, order.given_up, on_train)
        with device.Meter(self.root) as meter:
            update = run_task(
                run.strategy,
                task_from_pb(message, trainer.spec),
                message.accepted_round,
                memory_from_pb(message.memory),
                model,
                trainer,
                run.folder.memories,
            )
        report, payload = update.report, pack(update.patches)
        if not report.peak_memory_bytes:
            report = replace(report, peak_memory_bytes=device.peak_memory_bytes(self.root))
        header = aggregator_pb2.UpdateHeader(
            run=run.name, report=report_to_pb(report), tensors=payload.manifest, digest=payload.digest
        )
        run.folder.outbox.put(message.round_num, header, payload)
        parcel = run.folder.outbox.get(message.round_num)
        assert parcel is not None, "it was written just now"
        return parcel, meter.usage

    async def evaluate(
        self, order: Order, task: coordinator_pb2.EvaluationTask
    ) -> coordinator_pb2.EvaluationDone:
        run, judge = order.run, order.run.evaluator
        assert judge is not None, "checked when the order came"
        model, _ = await order.unless_given_up(download(run, task.model_version, self.worker))
        begin = time.monotonic()
        exits = run.strategy.exits_to_average(run.trainer.spec)
        score = await order.unless_given_up(self.worker.run(partial(judge, model, exits)))
        return coordinator_pb2.EvaluationDone(
            run=run.name,
            model_version=task.model_version,
            accuracy=score.accuracy,
            loss=score.loss,
            num_samples=score.num_targets,
            seconds=time.monotonic() - begin,
        )


def _device_state(usage: device.Usage) -> coordinator_pb2.DeviceState:
    return coordinator_pb2.DeviceState(
        power_watts=usage.watts, energy_joules=usage.joules, temperature_celsius=usage.celsius
    )
