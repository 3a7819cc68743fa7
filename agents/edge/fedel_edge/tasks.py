"""One task of the coordinator, from its start to its answer: download, train or test, store, upload."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedel.roles.edge import run_task
from fedel.security.folder import Credentials
from fedel.types import Tensors, Window
from fedel.v1 import aggregator_pb2, coordinator_pb2, task_pb2
from fedel.wire.codec import memory_from_pb, report_to_pb, task_from_pb, window_to_pb
from fedel.wire.payload import pack
from fedel_edge import device
from fedel_edge.exchange import Exchange
from fedel_edge.joined_runs import JoinedRun
from fedel_edge.progress import WatchedTrainer
from fedel_edge.run_folder import StoredUpdate
from fedel_edge.slowdown import SlowedTrainer
from fedel_edge.transfer import download, upload
from fedel_edge.worker import Worker

Send = Callable[[coordinator_pb2.SessionRequest], None]


class Abandoned(Exception):
    """The task was given up; raised in the worker's thread to end its training."""


class TaskRun:
    """The work on one assignment, until it is settled or given up.

    Giving up has to reach two places, and takes two signals. The coroutine, which waits for its
    turn, for a transfer or for the worker, is cancelled. A function that runs in the worker's thread cannot be
    cancelled: it looks at ``given_up`` between its steps, and ends a sleep when it is set.
    """

    def __init__(self, run: JoinedRun, exchange: Exchange | None = None) -> None:
        self.run, self.exchange = run, exchange
        self.phase = ""
        self.given_up = threading.Event()
        self.over_time = False
        """Given up because it took longer than this device's owner allows."""
        self.task: asyncio.Future[None] | None = None
        """The coroutine, once it is started."""

    def give_up(self) -> None:
        self.given_up.set()
        if self.task is not None:
            self.task.cancel()

    def run_out_of_time(self) -> None:
        self.over_time = True
        self.give_up()

    def check(self) -> None:
        if self.given_up.is_set():
            raise Abandoned


@dataclass(frozen=True)
class TaskRunner:
    """Carries out tasks and evaluations."""

    worker: Worker
    send: Send
    slowdown: float = 1.0
    clock: Callable[[], float] = time.perf_counter
    """Measures how long the trainer is busy."""
    root: Path = Path("/")
    """Root of the file system that the device's sensors are read from."""
    credentials: Callable[[], Credentials | None] = lambda: None
    """This device's certificate, which signs keys of secure aggregation; none without mTLS."""

    async def train(self, task_run: TaskRun, task: task_pb2.Task) -> coordinator_pb2.TaskDone:
        """Carry out a task. An update that is stored from before a restart is only sent."""
        run, phases = task_run.run, coordinator_pb2.PhaseSeconds()
        stored = await self.worker.run(partial(run.folder.outbox.get, task.round_num))
        update, usage, bytes_down = (
            (stored, device.Usage(), 0) if stored is not None else await self._make(task_run, task, phases)
        )
        begin, exchange = time.monotonic(), task_run.exchange
        if exchange is not None:
            update = await exchange.masked(run, update, self.worker, self.send, self.credentials())
        agreed = time.monotonic() - begin
        begin = self._enter(task_run, task, "upload")
        bytes_up, waited = await upload(run, update)
        phases.upload, phases.wait = time.monotonic() - begin - waited, waited + agreed
        return coordinator_pb2.TaskDone(
            run=run.name,
            report=update.header.report,
            phases=phases,
            bytes_up=bytes_up + (exchange.num_bytes if exchange else 0),
            bytes_down=bytes_down,
            device=_device_state(usage),
        )

    async def _make(
        self, task_run: TaskRun, task: task_pb2.Task, phases: coordinator_pb2.PhaseSeconds
    ) -> tuple[StoredUpdate, device.Usage, int]:
        begin = self._enter(task_run, task, "download")
        model, bytes_down = await download(task_run.run, task.model_version, self.worker)
        phases.download = time.monotonic() - begin
        begin = self._enter(task_run, task, "train")
        fit = partial(self._fit, task_run, task, model, asyncio.get_running_loop())
        update, usage = await self.worker.run(fit)
        phases.train = time.monotonic() - begin
        return update, usage, bytes_down

    def _enter(self, task_run: TaskRun, task: task_pb2.Task, phase: str) -> float:
        task_run.phase = phase
        self._report(task, phase)
        return time.monotonic()

    def _report(self, task: task_pb2.Task, phase: str, window: task_pb2.WindowState | None = None) -> None:
        progress = coordinator_pb2.TaskProgress(
            run=task.run, round_num=task.round_num, phase=phase, window=window
        )
        self.send(coordinator_pb2.SessionRequest(progress=progress))

    def _fit(
        self, task_run: TaskRun, message: task_pb2.Task, model: Tensors, loop: asyncio.AbstractEventLoop
    ) -> tuple[StoredUpdate, device.Usage]:
        """In the worker's thread: train, and store the update so that it survives a power cut."""
        run = task_run.run

        def on_train(window: Window, selected: tuple[str, ...]) -> None:
            state = window_to_pb(window, 0, 0, selected)
            loop.call_soon_threadsafe(self._report, message, "train", state)

        slowed = SlowedTrainer(run.trainer, self.slowdown, task_run.given_up, self.clock)
        trainer = WatchedTrainer(slowed, task_run.check, on_train)
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
        return run.folder.outbox.put(message.round_num, header, payload), meter.usage

    async def evaluate(
        self, task_run: TaskRun, task: coordinator_pb2.EvaluationTask
    ) -> coordinator_pb2.EvaluationDone:
        run, evaluator = task_run.run, task_run.run.evaluator
        assert evaluator is not None, "checked when the task came"
        model, _ = await download(run, task.model_version, self.worker)
        begin = time.monotonic()
        exits = run.strategy.exits_to_average(run.trainer.spec)
        score = await self.worker.run(partial(evaluator, model, exits))
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
