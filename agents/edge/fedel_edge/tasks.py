"""One task of the coordinator, from its start to its answer: download, train or test, store, upload."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fedel.core.budgeted import MAX_FILL, Prices
from fedel.roles.edge import recall, run_task
from fedel.security.folder import Credentials
from fedel.strategies.base import CorrectedTrainer, needed_by
from fedel.types import CLOCK_PACE, Memory, SentUpdate, Task, Tensors, Trainer, TrainSpec, Window
from fedel.v1 import aggregator_pb2, coordinator_pb2, task_pb2
from fedel.wire.channel import Dialer
from fedel.wire.codec import memory_from_pb, report_to_pb, task_from_pb, window_to_pb
from fedel.wire.payload import pack
from fedel_edge import device
from fedel_edge.exchange import Exchange
from fedel_edge.joined_runs import JoinedRun
from fedel_edge.memory_limit import LimitLowered, fit_in_memory, within_memory
from fedel_edge.pace import Clocks, PacedTrainer, Until
from fedel_edge.progress import WatchedTrainer
from fedel_edge.run_folder import StoredUpdate
from fedel_edge.transfer import download, download_tested, upload
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
class _Start:
    """What a training starts from."""

    trainer: Trainer
    memory: Memory
    model: Tensors
    bytes_down: int


@dataclass(frozen=True)
class TaskRunner:
    """Carries out tasks and evaluations."""

    worker: Worker
    tester: Worker
    """Tests models beside the training."""
    send: Send
    slowdown: float = 1.0
    clocks: Clocks = field(default_factory=Clocks)
    """Measure the training."""
    root: Path = Path("/")
    """Root of the file system that the device's sensors are read from."""
    credentials: Callable[[], Credentials | None] = lambda: None
    """This device's certificate, which signs keys of secure aggregation; none without mTLS."""
    dial: Callable[[], Dialer] = Dialer
    """Makes the connections to aggregators for one task or test. They end with it: gRPC keeps memory for each
    in a server, half a megabyte after an upload (docs/decisions/0023-a-task-has-its-own-connections.md)."""

    async def train(self, task_run: TaskRun, task: task_pb2.Task) -> coordinator_pb2.TaskDone:
        """Carry out a task. An update that is stored from before a restart is only sent."""
        async with self.dial() as dialer:
            return await self._train(task_run, task, dialer)

    async def _train(self, task_run: TaskRun, task: task_pb2.Task, dialer: Dialer) -> coordinator_pb2.TaskDone:
        run, phases = task_run.run, coordinator_pb2.PhaseSeconds()
        start, usage, started = None, device.Usage(), self.clocks.now()
        async with run.downloading:  # from the start: a test that came after this task downloads after it
            update = await self.worker.run(partial(run.folder.outbox.get, task.round_num))
            if update is None:
                begin = self._enter(task_run, task, "download")
                start = await self._download(run, dialer, task, self._trainer(task_run, task, started))
                phases.download = time.monotonic() - begin
        if update is None:
            assert start is not None
            update, usage = await self._make(task_run, dialer, task, start, phases)
        begin, exchange = time.monotonic(), task_run.exchange
        if exchange is not None:
            update = await exchange.masked(run, update, self.worker, self.send, self.credentials())
        agreed = time.monotonic() - begin
        begin = self._enter(task_run, task, "upload")
        bytes_up, waited = await upload(run, dialer, update)
        phases.upload, phases.wait = time.monotonic() - begin - waited, waited + agreed
        return coordinator_pb2.TaskDone(
            run=run.name,
            report=update.header.report,
            phases=phases,
            bytes_up=bytes_up + (exchange.num_bytes if exchange else 0),
            bytes_down=start.bytes_down if start else 0,
            device=_device_state(usage),
        )

    async def _download(self, run: JoinedRun, dialer: Dialer, task: task_pb2.Task, trainer: Trainer) -> _Start:
        memory, needed = await self.worker.run(partial(_recall, run, task, trainer))
        model, num_bytes = await download(run, dialer, task.model_version, self.worker, needed)
        return _Start(trainer, memory, model, num_bytes)

    async def _make(
        self,
        task_run: TaskRun,
        dialer: Dialer,
        task: task_pb2.Task,
        start: _Start,
        phases: coordinator_pb2.PhaseSeconds,
    ) -> tuple[StoredUpdate, device.Usage]:
        run, begin = task_run.run, self._enter(task_run, task, "train")
        while True:
            try:
                update, usage = await self.worker.run(partial(self._fit, run, task, start))
            except LimitLowered:
                async with run.downloading:  # a smaller window may be at another place
                    start = await self._download(run, dialer, task, start.trainer)
            else:
                phases.train = time.monotonic() - begin
                return update, usage

    def _enter(self, task_run: TaskRun, task: task_pb2.Task, phase: str) -> float:
        task_run.phase = phase
        self._report(task, phase)
        return time.monotonic()

    def _report(self, task: task_pb2.Task, phase: str, window: task_pb2.WindowState | None = None) -> None:
        progress = coordinator_pb2.TaskProgress(
            run=task.run, round_num=task.round_num, phase=phase, window=window
        )
        self.send(coordinator_pb2.SessionRequest(progress=progress))

    def _trainer(self, task_run: TaskRun, message: task_pb2.Task, started: float) -> Trainer:
        run, loop = task_run.run, asyncio.get_running_loop()

        def on_train(window: Window, selected: tuple[str, ...]) -> None:
            state = window_to_pb(window, 0, 0, selected)
            loop.call_soon_threadsafe(self._report, message, "train", state)

        task = _task(run, message)
        until = self._until(run, task, started)
        paced = PacedTrainer(run.trainer, task_run.given_up, self.slowdown, until, self.clocks)
        return WatchedTrainer(CorrectedTrainer(paced, task.speed), task_run.check, on_train)

    def _fit(self, run: JoinedRun, message: task_pb2.Task, start: _Start) -> tuple[StoredUpdate, device.Usage]:
        """In the worker's thread: train, and store the update so that it survives a power cut."""
        trainer, memories = start.trainer, run.folder.memories

        def fit(task: Task) -> SentUpdate:
            return run_task(run.strategy, task, start.memory, start.model, trainer, memories)

        with device.Meter(self.root) as meter:
            task = _task(run, message)
            update = fit_in_memory(fit, task, run.strategy, trainer, run.folder.memory_limit)
        trained_at = self.clocks.now()
        report, payload = update.report, pack(update.patches)
        if not report.peak_memory_bytes:
            report = replace(report, peak_memory_bytes=device.peak_memory_bytes(self.root))
        header = aggregator_pb2.UpdateHeader(
            run=run.name, report=report_to_pb(report), tensors=payload.manifest, digest=payload.digest
        )
        stored = run.folder.outbox.put(message.round_num, header, payload)
        run.store_seconds = self.clocks.now() - trained_at
        return stored, meter.usage

    def _until(self, run: JoinedRun, task: Task, started: float) -> Until | None:
        """When the training has to end so that T_th holds; ``None`` where the plan sets its steps."""
        strategy, trainer = run.strategy, run.trainer
        if task.pace != CLOCK_PACE or not strategy.fits_steps:
            return None
        prices = Prices.of(task, trainer, strategy.budget_scope)
        begin = started if prices.whole_round else self.clocks.now()

        def moment(train_spec: TrainSpec) -> float:
            window = Window(train_spec.end, max(train_spec.exits))
            after = prices.upload_seconds(train_spec.selected, window)
            return begin + prices.round_seconds - after - (run.store_seconds if prices.whole_round else 0.0)

        return Until(moment, MAX_FILL * prices.num_steps, prices.part_of_batch)

    async def evaluate(
        self, task_run: TaskRun, task: coordinator_pb2.EvaluationTask
    ) -> coordinator_pb2.EvaluationDone:
        run, worker, evaluator = task_run.run, self.worker, task_run.run.test_of(task.own)
        if run.tests_beside_training:
            made = run.beside.get(task.own)  # if so, no training has to be waited for
            evaluator = made or await worker.run(partial(run.make_beside, task.own))
            worker = self.tester
        assert evaluator is not None, "checked when the task came"
        async with run.downloading, self.dial() as dialer:
            model = await download_tested(run, dialer, task.model_version, worker)
        begin = time.monotonic()
        exits = run.strategy.exits_to_average(run.trainer.spec)
        score = await worker.run(partial(evaluator, model, exits))
        return coordinator_pb2.EvaluationDone(
            run=run.name,
            model_version=task.model_version,
            accuracy=score.accuracy,
            loss=score.loss,
            num_samples=run.held_out.num_samples if task.own and run.held_out else score.num_targets,
            seconds=time.monotonic() - begin,
            own=task.own,
        )


def _task(run: JoinedRun, message: task_pb2.Task) -> Task:
    return task_from_pb(message, run.trainer.spec, run.config.upload)


def _recall(run: JoinedRun, message: task_pb2.Task, trainer: Trainer) -> tuple[Memory, frozenset[str]]:
    """In the worker's thread: what the task starts from, and the tensors that it needs of the model."""
    memory = recall(message.accepted_round, memory_from_pb(message.memory), run.folder.memories)
    task = within_memory(_task(run, message), trainer, run.folder.memory_limit)
    return memory, needed_by(run.strategy, task, memory, trainer)


def _device_state(usage: device.Usage) -> coordinator_pb2.DeviceState:
    return coordinator_pb2.DeviceState(
        power_watts=usage.watts, energy_joules=usage.joules, temperature_celsius=usage.celsius
    )
