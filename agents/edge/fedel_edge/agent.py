"""The agent: hears what the coordinator asks for, and carries it out, one order after the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from grpc import aio
from prometheus_client import CollectorRegistry

import fedel
from fedel.errors import FedelError
from fedel.telemetry import AgentMetrics
from fedel.v1 import coordinator_pb2, task_pb2
from fedel.v1.aggregator_pb2_grpc import AggregatorServiceStub
from fedel.v1.coordinator_pb2 import SessionRequest
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedel.wire.channel import Dialer
from fedel.wire.streams import reason_of
from fedel_edge import device
from fedel_edge.certificates import keep_renewed, with_certificate_name
from fedel_edge.config import AgentConfig
from fedel_edge.runs import Run, Shard, identity_of, prepare
from fedel_edge.session import Session
from fedel_edge.slow import Abandoned
from fedel_edge.tasks import Order, Workbench
from fedel_edge.worker import Worker

_log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[None]]
TASK, EVALUATION = "task", "evaluation"


class Agent:
    """Takes part in every run the coordinator offers, until it is told to stop."""

    def __init__(
        self, config: AgentConfig, root: Path = Path("/"), metrics: AgentMetrics | None = None
    ) -> None:
        self._dialer = Dialer(config.tls)
        self.config = config = with_certificate_name(config, self._dialer.credentials)
        self._metrics = metrics or AgentMetrics(CollectorRegistry())
        self.worker = Worker()
        # One busy thread: its own time does not count waiting for a core that others use.
        alone = config.threads == 1 and config.device == "cpu"
        clock = time.thread_time if alone else time.perf_counter
        self._bench = Workbench(self.worker, self._send, config.slowdown, clock, root)
        self._facts = device.facts(root)
        self.counts: Counter[str] = Counter()
        """Tasks that were ``done``, ``failed`` or ``given_up``, and ``evaluations``."""
        self._runs: dict[str, Run] = {}
        self._orders: dict[tuple[str, str], Order] = {}
        """The newest task and the newest evaluation of each run, until the round is closed."""
        self._jobs: asyncio.Queue[Job] = asyncio.Queue()
        self._session: Session | None = None
        self._in_session = False
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Finish the upload that is under way, say goodbye, and end ``run``."""
        self._stopping.set()

    @property
    def status(self) -> str:
        """A line for whoever looks at the process."""
        doing = "in session with" if self._in_session else "looking for"
        done, failed = self.counts["done"], self.counts["failed"]
        return f"{doing} {self.config.coordinator}; tasks: {done} done, {failed} failed"

    async def run(self) -> None:
        address = self.config.coordinator
        _log.info("%s: %s", address, self.config.tls.check(address))
        self._session = Session(
            lambda: CoordinatorServiceStub(self._dialer.channel(address)),
            self._hello(),
            self._hear,
            self._broke,
        )
        work = [self._session.wait(), self._work(), self._stopping.wait()]
        if self._dialer.credentials:
            work.append(keep_renewed(self._dialer, address, self._session.redial))
        tasks = [asyncio.ensure_future(w) for w in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self._session.close()
            await self._dialer.close()

    async def _drain(self) -> None:
        for order in list(self._orders.values()):
            if order.phase == "upload":
                await order.finished(self.config.grace_seconds)
            order.give_up()

    def _hello(self) -> coordinator_pb2.Hello:
        facts = coordinator_pb2.DeviceFacts(
            device_type=self.config.device_type or self._facts.device_type,
            memory_bytes=self._facts.memory_bytes,
            agent_version=fedel.__version__,
        )
        return coordinator_pb2.Hello(client=self.config.client, device=facts)

    def _send(self, message: SessionRequest) -> None:
        if self._session is not None:
            self._session.send(message)

    def _broke(self) -> None:
        """A stream ended; one that never came to a welcome was no session."""
        self._metrics.reconnects.inc(self._in_session)
        self._in_session = False
        self._metrics.connected.set(0)

    def _hear(self, message: coordinator_pb2.SessionResponse) -> None:
        kind = message.WhichOneof("kind")
        if kind == "welcome":
            self._in_session = True
            self._metrics.connected.set(1)
        elif kind == "run":
            self._jobs.put_nowait(partial(self._on_offer, message.run))
        elif kind == "task":
            self._on_task(message.task)
        elif kind == "evaluate":
            self._on_evaluate(message.evaluate)
        elif kind == "closed":
            self._on_closed(message.closed)
        elif kind == "ended":
            self._on_ended(message.ended)
        elif kind == "refused":
            _log.error("%s", message.refused.reason, extra={"run": message.refused.run})
            self._let_go(message.refused.run)

    async def _on_offer(self, offer: coordinator_pb2.RunOffer) -> None:
        """Get ready and join; a run known from an earlier session is joined again, as things stand."""
        run = self._runs.get(offer.run)
        if run is None or run.identity != identity_of(offer):
            self._let_go(offer.run)
            try:
                for shard in offer.shards:
                    self.config.tls.check(shard.address)
                run = await self.worker.run(partial(prepare, offer, self.config))
            except Exception as error:
                self._failed(offer.run, -1, error)
                return
            self._runs[offer.run] = run
        channel = self._dialer.channel
        run.shards = tuple(
            Shard(AggregatorServiceStub(channel(s.address)), frozenset(s.tensors)) for s in offer.shards
        )
        self._send(SessionRequest(join=run.join(self.config.slowdown)))
        for order in self._orders.values():
            if order.run is run and order.outcome is not None:
                self._send(order.outcome)

    def _on_task(self, task: task_pb2.Task) -> None:
        run = self._runs.get(task.run)
        answer = coordinator_pb2.TaskAnswer(run=task.run, round_num=task.round_num, accepted=run is not None)
        if run is None:
            answer.reason = f"this agent has not joined run '{task.run}'"
        self._send(SessionRequest(answer=answer))
        if run is not None:
            self._take_up(TASK, Order(run, task.round_num), partial(self._train, task))

    def _on_evaluate(self, task: coordinator_pb2.EvaluationTask) -> None:
        run = self._runs.get(task.run)
        if run is None or run.evaluator is None:
            self._failed(task.run, -1, FedelError(f"this agent cannot evaluate run '{task.run}'"))
        else:
            self._take_up(EVALUATION, Order(run, task.model_version), partial(self._evaluate, task))

    def _take_up(self, kind: str, order: Order, work: Callable[[Order], Awaitable[None]]) -> None:
        """Queue an order, which supersedes an earlier one; one that is repeated is answered again."""
        key = (order.run.name, kind)
        known = self._orders.get(key)
        if known is not None and known.number == order.number:
            if known.outcome is not None:
                self._send(known.outcome)
            return
        if known is not None:
            known.give_up()
        self._orders[key] = order
        self._jobs.put_nowait(partial(work, order))

    def _on_closed(self, closed: coordinator_pb2.RoundClosed) -> None:
        run = self._runs.get(closed.run)
        if run is None:
            return
        # Where late updates count in the next round, one is worth working on for a round longer.
        over = closed.round_num - (run.config.rounds.late == "next" and not closed.counted)
        order = self._orders.get((closed.run, TASK))
        if order is not None and order.number <= over:
            self._orders.pop((closed.run, TASK)).give_up()
        run.folder.outbox.drop(up_to=over)

    def _on_ended(self, ended: coordinator_pb2.RunEnded) -> None:
        phase = coordinator_pb2.RunPhase.Name(ended.phase).removeprefix("RUN_PHASE_").lower()
        _log.info("run '%s' is over: %s", ended.run, phase, extra={"run": ended.run})
        run = self._runs.get(ended.run)
        self._let_go(ended.run)
        if run is not None:
            # Behind a training that was given up and still writes there.
            self._jobs.put_nowait(partial(self.worker.run, run.folder.remove))

    def _let_go(self, name: str) -> None:
        self._runs.pop(name, None)
        for key in [key for key in self._orders if key[0] == name]:
            self._orders.pop(key).give_up()

    async def _work(self) -> None:
        while True:
            job = await self._jobs.get()
            await job()

    async def _train(self, task: task_pb2.Task, order: Order) -> None:
        about = {"run": task.run, "round": task.round_num, "client": self.config.client}
        try:
            done = await self._bench.train(order, task)
        except Abandoned:
            self._count("given_up")
            _log.info("gave up round %d of run '%s'", task.round_num, task.run, extra=about)
            order.settle(None)
            return
        except Exception as error:
            self._count("failed")
            order.run.folder.outbox.drop(up_to=task.round_num)
            order.settle(self._failed(task.run, task.round_num, error))
            return
        self._count("done")
        self._metrics.observe(done.report.train_seconds, task.budget_seconds * max(1, done.report.num_steps))
        request = SessionRequest(done=done)
        self._send(request)
        order.settle(request)
        _log.info("%s", _line(done), extra=about)

    def _count(self, outcome: str) -> None:
        self.counts[outcome] += 1
        self._metrics.tasks.labels(outcome).inc()

    async def _evaluate(self, task: coordinator_pb2.EvaluationTask, order: Order) -> None:
        try:
            request = SessionRequest(evaluation=await self._bench.evaluate(order, task))
        except Abandoned:
            order.settle(None)
            return
        except Exception as error:
            self._failed(task.run, -1, error)
            order.settle(None)
            if self._orders.get((task.run, EVALUATION)) is order:
                del self._orders[task.run, EVALUATION]  # asked again, it is tried again
            return
        self.counts["evaluations"] += 1
        self._send(request)
        order.settle(request)

    def _failed(self, run: str, round_num: int, error: Exception) -> SessionRequest:
        """Tell the coordinator and the log; an error nobody foresaw comes with its trace."""
        message = str(error)
        if isinstance(error, aio.AioRpcError):
            message = f"{reason_of(error) or error.code().name.lower()}: {error.details()}"
        elif not isinstance(error, FedelError):
            message = f"{type(error).__name__}: {error}"
        foreseen = isinstance(error, aio.AioRpcError | FedelError)
        about = {"run": run, "round": round_num, "client": self.config.client}
        _log.error("%s", message, exc_info=None if foreseen else error, extra=about)
        failed = coordinator_pb2.TaskFailed(run=run, round_num=round_num, message=message)
        request = SessionRequest(failed=failed)
        self._send(request)
        return request


def _line(done: coordinator_pb2.TaskDone) -> str:
    report, window = done.report, done.report.window
    blocks = f"blocks {window.end_block}-{window.front_block}, " if window.front_block else ""
    return (
        f"round {report.round_num}: {blocks}loss {report.loss:.4f}, {report.train_seconds:.2f} s of training, "
        f"{done.bytes_up / 1e6:.2f} MB up, {done.bytes_down / 1e6:.2f} MB down"
    )
