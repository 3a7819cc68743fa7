"""The agent: takes messages to ``AgentState``, which decides, and carries out what it decided."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

import fedel
from fedel.errors import FedelError, ServiceError
from fedel.roles.gate import MAX_NAME, clean
from fedel.roles.recorder import counted_seconds
from fedel.telemetry import AgentMetrics
from fedel.v1 import coordinator_pb2, task_pb2
from fedel.v1.coordinator_pb2 import SessionRequest, SessionResponse
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import Dialer
from fedel.wire.codec import speed_from_pb
from fedel.wire.protocol import PROTOCOL
from fedel_edge import agent_state as decided
from fedel_edge import device, words
from fedel_edge.agent_state import AgentState, Assignment, Effect
from fedel_edge.certificates import keep_renewed, with_certificate_name
from fedel_edge.config import AgentConfig
from fedel_edge.drift import is_idle
from fedel_edge.job_code import CodeDesk, TakenCode
from fedel_edge.joined_runs import JoinedRun, Shard, prepare
from fedel_edge.pace import Clocks
from fedel_edge.session import Session
from fedel_edge.tasks import TaskRun, TaskRunner
from fedel_edge.worker import Worker

_log = logging.getLogger(__name__)
IDLE_SECONDS, IDLE_ROUNDS = 2.0, 2
"""Without a task for this long, and for as long as this many rounds take, a device has time to measure its
profile again."""
STUCK_SECONDS = 60.0
"""How long a training that was given up may go on before the agent ends itself."""


class Agent:
    """Takes part in every run that the coordinator offers, until it is stopped."""

    def __init__(
        self, config: AgentConfig, root: Path = Path("/"), metrics: AgentMetrics | None = None
    ) -> None:
        self._dialer = Dialer(config.tls)
        self.config = config = with_certificate_name(config, self._dialer.credentials)
        self._metrics = metrics or AgentMetrics(CollectorRegistry())
        self.worker, self.tester = Worker(), Worker("tester")
        # With one busy thread, that thread's own time does not include waiting for a core that others use.
        one_thread = config.threads == 1 and config.device == "cpu"
        busy = time.thread_time if one_thread else time.perf_counter
        self._runner = TaskRunner(
            self.worker,
            self.tester,
            self._send,
            config.slowdown,
            Clocks(busy=busy),
            root,
            lambda: self._dialer.credentials,
            self._dialer.beside,
        )
        self._facts = device.facts(root)
        self.counts: Counter[str] = Counter()
        """Tasks that were ``done``, ``failed`` or ``given_up``, and ``evaluations``."""
        self._state = AgentState(config.client, config.slowdown, config.limits)
        self._code_desk = CodeDesk(config.code, config.tls, config.state_dir, config.client)
        self._codes: dict[str, TakenCode] = {}
        """What came with jobs, by run."""
        self._task_runs: dict[Assignment, TaskRun] = {}
        """Those that are not settled yet."""
        self._turn = asyncio.Lock()
        """Held by the one assignment that is worked on; the others wait for it in their order of arrival."""
        self._test_turn = asyncio.Lock()
        """The same for tests beside the training."""
        self._building = asyncio.Lock()
        """Held while a run is prepared: an offer that is replaced meanwhile is not."""
        self._background: set[asyncio.Future[None]] = set()
        self._session: Session | None = None
        self._in_session = False
        self._stopping = asyncio.Event()
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Finish an upload that is under way, say goodbye, and end ``run``."""
        self._stopping.set()

    @property
    def busy(self) -> bool:
        """Whether a thread works, or has work waiting."""
        return self.worker.busy or self.tester.busy

    @property
    def status(self) -> str:
        """One line for the service manager."""
        doing = "in session with" if self._in_session else "looking for"
        done, failed = self.counts["done"], self.counts["failed"]
        return f"{doing} {self.config.coordinator}; tasks: {done} done, {failed} failed"

    async def run(self) -> None:
        address = self.config.coordinator
        _log.info("%s: %s", address, self.config.tls.check(address))
        self._session = Session(
            lambda: CoordinatorServiceStub(self._dialer.channel(address)),
            self._hello(),
            self._on_message,
            self._on_break,
        )
        self._spawn(self._session.wait())
        if self._dialer.credentials:
            self._spawn(keep_renewed(self._dialer, address, self._session.redial))
        try:
            await self._stopping.wait()
            await self._drain()
        finally:
            self._give_up_all()
            for task in self._background:
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            await self._session.close()
            await self._dialer.close()
        if self._error is not None:
            raise self._error

    async def _drain(self) -> None:
        """An upload that is under way may still take a while; everything else can be done again."""
        uploads = [run.task for run in self._task_runs.values() if run.phase == "upload" and run.task]
        if uploads and self._error is None:
            await asyncio.wait(uploads, timeout=self.config.grace_seconds)

    def _give_up_all(self) -> None:
        for task_run in list(self._task_runs.values()):
            task_run.give_up()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        """Run in the background. What nobody foresaw there ends the agent: the service manager restarts it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._on_background_end)
        return task

    def _on_background_end(self, task: asyncio.Future[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._stopping.set()

    def _hello(self) -> coordinator_pb2.Hello:
        facts = coordinator_pb2.DeviceFacts(
            device_type=self.config.device_type or self._facts.device_type,
            memory_bytes=self._facts.memory_bytes,
            agent_version=fedel.__version__,
        )
        return coordinator_pb2.Hello(
            client=self.config.client, device=facts, protocol=PROTOCOL, labels=self.config.labels
        )

    def _send(self, message: SessionRequest) -> None:
        if self._session is not None:
            self._session.send(message)

    def _on_break(self) -> None:
        """A stream ended; one that was never welcomed was not a session."""
        self._metrics.reconnects.inc(self._in_session)
        self._in_session = False
        self._metrics.connected.set(0)

    def _on_message(self, message: SessionResponse) -> None:
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            self._in_session = True
            self._metrics.connected.set(1)
        elif kind == "refused":
            _log.error("%s", clean(message.refused.reason), extra={"run": clean(message.refused.run)})
        elif kind == "ended":
            name = clean(message.ended.run, MAX_NAME)
            _log.info("run '%s' is over: %s", name, words.phase_of(message.ended.phase), extra={"run": name})
        effects = self._state.receive(message)
        for effect in effects:
            if isinstance(effect, decided.Send) and (refusal := words.refusal_in(effect.message)):
                _log.warning("refused: %s", refusal, extra={"client": self.config.client})
        self._carry_out(effects)

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        """Nothing here waits: what takes long is begun, in the worker or in the background."""
        for effect in effects:
            match effect:
                case decided.Send(message):
                    self._send(message)
                case decided.Prepare(offer):
                    self._spawn(self._prepare(offer))
                case decided.Join(run, shards):
                    self._join(run, shards)
                case decided.Start(assignment):
                    task_run = self._task_runs[assignment] = TaskRun(assignment.run, assignment.exchange)
                    task_run.task = self._spawn(self._work(assignment, task_run))
                case decided.GiveUp(assignment):
                    self._give_up(assignment)
                # In the worker, behind a training that was given up and still writes there.
                case decided.DropUpdates(run, up_to):
                    self._spawn(self.worker.run(partial(run.folder.outbox.drop, up_to)))
                case decided.Measure(run):
                    self._spawn(self._profile_again(run, 0.0, asked=True))
                case decided.RemoveFolder(run):
                    self._spawn(self._remove(run))

    async def _remove(self, run: JoinedRun) -> None:
        await self._last_test_ended()
        await self.worker.run(run.folder.remove)
        if run.name not in self._state.names:
            self._use_code(run.name, None)

    def _use_code(self, run: str, taken: TakenCode | None) -> None:
        """Code of an earlier run of this name is forgotten."""
        if run in self._codes:
            self._codes.pop(run).code.close()
        if taken is not None:
            self._codes[run] = taken

    def _last_test_ended(self) -> asyncio.Future[None]:
        """A test that was given up may still write into the folder of its run, which another may get."""
        return self.tester.run(lambda: None)

    async def _prepare(self, offer: coordinator_pb2.RunOffer) -> None:
        async with self._building:
            await self._last_test_ended()
            if not self._state.wants(offer):
                return
            try:
                for shard in offer.shards:
                    self.config.tls.check(shard.address)
                in_use = self._state.names - {offer.run}
                taken = await self._code_desk.take(offer, self._dialer, self.config.coordinator)
                self._use_code(offer.run, taken)
                code = taken.code if taken else None
                run = await self._within_limit(partial(prepare, offer, self.config, in_use, code))
                if taken is not None:
                    await self.worker.run(partial(run.folder.keep_code, taken.stored))
            except Exception as error:
                self._use_code(offer.run, None)
                self._carry_out(self._state.not_prepared(offer, self._failure(offer.run, -1, error)))
            else:
                self._carry_out(self._state.prepared(run))

    async def _within_limit(self, build: Callable[[], JoinedRun]) -> JoinedRun:
        """Build a run in the worker; the time counts from when the worker begins with it."""
        loop, limit = asyncio.get_running_loop(), self.config.limits.max_prepare_seconds
        begun = asyncio.Event()

        def work() -> JoinedRun:
            loop.call_soon_threadsafe(begun.set)
            return build()

        building = self.worker.run(work)
        await begun.wait()
        done, _ = await asyncio.wait({building}, timeout=limit)
        if not done:
            building.cancel()
            self._spawn(self._free(self.worker))
            raise ServiceError(
                "preparing the run (code, data, measuring a profile) took longer than"
                f" limits.max_prepare_seconds = {limit:g} of this device: given up; raise the limit there, or"
                " give the device a profile"
            )
        return building.result()

    def _join(self, run: JoinedRun, shards: Sequence[coordinator_pb2.Shard]) -> None:
        try:
            for shard in shards:
                self._dialer.tls.check(shard.address)
        except FedelError as error:
            self._send(self._failure(run.name, -1, error))
            return
        run.use_shards(tuple(Shard(s.address, frozenset(s.tensors)) for s in shards))
        self._send(SessionRequest(join=run.join(self.config.slowdown)))

    def _give_up(self, assignment: Assignment) -> None:
        task_run = self._task_runs.pop(assignment, None)
        if task_run is None:
            return  # it is settled
        task_run.give_up()
        if isinstance(assignment.message, task_pb2.Task):
            self._count("given_up")
            name, number = assignment.run.name, assignment.number
            _log.info("gave up round %d of run '%s'", number, name, extra=self._about(name, number))

    async def _work(self, assignment: Assignment, task_run: TaskRun) -> None:
        """One assignment after the other, tests beside the training; cancelled when it is given up."""
        is_test = isinstance(assignment.message, coordinator_pb2.EvaluationTask)
        beside = is_test and assignment.run.tests_beside_training
        async with self._test_turn if beside else self._turn:
            limit = self.config.limits.max_task_seconds
            timer = asyncio.get_running_loop().call_later(limit, task_run.run_out_of_time)
            try:
                outcome = await self._outcome(assignment.message, task_run)
            except asyncio.CancelledError:
                if not task_run.over_time:
                    raise
                outcome = self._over_time(assignment, self.tester if beside else self.worker)
            finally:
                timer.cancel()
        self._task_runs.pop(assignment, None)
        self._carry_out(self._state.settled(assignment, outcome))

    async def _outcome(
        self, message: task_pb2.Task | coordinator_pb2.EvaluationTask, task_run: TaskRun
    ) -> SessionRequest:
        if isinstance(message, task_pb2.Task):
            return await self._train(message, task_run)
        return await self._evaluate(message, task_run)

    def _over_time(self, assignment: Assignment, worker: Worker) -> SessionRequest:
        """The work took longer than this device's owner allows; what runs in the worker may not have ended."""
        self._spawn(self._free(worker))
        is_task = isinstance(assignment.message, task_pb2.Task)
        if is_task:
            self._count("failed")
        limit = self.config.limits.max_task_seconds
        error = ServiceError(
            f"it took longer than limits.max_task_seconds = {limit:g} of this device: given up"
        )
        failure = self._failure(assignment.run.name, assignment.number if is_task else -1, error)
        message = assignment.message
        is_own = isinstance(message, coordinator_pb2.EvaluationTask) and message.own
        return decided.own_test_failed(message, failure.failed.message) if is_own else failure  # type: ignore[arg-type]

    async def _free(self, worker: Worker) -> None:
        try:
            await asyncio.wait_for(worker.run(lambda: None), STUCK_SECONDS)
        except asyncio.TimeoutError:
            raise ServiceError(
                f"what was given up still runs after {STUCK_SECONDS:g} s and cannot be"
                " interrupted: the agent ends; its service manager starts it again"
            ) from None

    async def _train(self, task: task_pb2.Task, task_run: TaskRun) -> SessionRequest:
        try:
            done = await self._runner.train(task_run, task)
        except Exception as error:
            self._count("failed")
            return self._failure(task.run, task.round_num, error)
        self._count("done")
        steps = task.work.num_steps or done.report.num_steps
        scope, phases = task_run.run.strategy.budget_scope, done.phases
        spent = {"download": phases.download, "train": phases.train, "upload": phases.upload}
        seconds = counted_seconds(scope, done.report.train_seconds, spent)
        self._metrics.observe(seconds, task.budget_seconds * max(1, steps))
        _log.info("%s", words.line_of(done), extra=self._about(task.run, task.round_num))
        if task.by_clock and task_run.run.drift.lasts(speed_from_pb(task.speed)):
            round_seconds = task.budget_seconds * max(1, steps)
            self._spawn(self._profile_again(task_run.run, round_seconds))
        return SessionRequest(done=done)

    async def _profile_again(self, run: JoinedRun, round_seconds: float, *, asked: bool = False) -> None:
        """Measure once there is nothing else to do; the coordinator learns the new profile by another join.

        Where an operator ``asked`` for it, this waits for as long as the run lasts.
        """
        seconds = max(IDLE_SECONDS, IDLE_ROUNDS * round_seconds)
        while not await is_idle(seconds, lambda: bool(self._task_runs), self.counts.total):
            if not asked or not self._state.takes_part(run):
                return  # where nobody asked, the next task in which the device is off does
        run.is_asked_to_measure = False
        async with self._turn:
            before = run.trainer.profile
            if not await self.worker.run(run.trainer.profile_again):
                return
            if run.drift.measured(before, run.trainer.profile) or asked:
                _log.info("measured the timing profile again", extra={"run": run.name})
                self._send(SessionRequest(join=run.join(self.config.slowdown)))

    async def _evaluate(self, task: coordinator_pb2.EvaluationTask, task_run: TaskRun) -> SessionRequest:
        try:
            done = await self._runner.evaluate(task_run, task)
        except Exception as error:
            failure = self._failure(task.run, -1, error)
            return decided.own_test_failed(task, failure.failed.message) if task.own else failure
        self.counts["evaluations"] += 1
        return SessionRequest(evaluation=done)

    def _count(self, outcome: str) -> None:
        self.counts[outcome] += 1
        self._metrics.tasks.labels(outcome).inc()

    def _about(self, run: str, round_num: int) -> dict[str, object]:
        """Fields of a log line."""
        return {"run": run, "round": round_num, "client": self.config.client}

    def _failure(self, run: str, round_num: int, error: Exception) -> SessionRequest:
        return words.failure(error, run, round_num, self._about(run, round_num))
