"""One run: where it stands, and what it makes of the messages of its agents. ``rounds.py`` drives it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from fedel.errors import ServiceError
from fedel.job import RunConfig
from fedel.roles.coordinator import Director, memory_of
from fedel.telemetry import CoordinatorMetrics
from fedel.types import Plan, Report, Task
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.codec import report_from_pb, task_to_pb
from fedel_coordinator.fleet import Fleet, Session
from fedel_coordinator.members import Members, objection, row_of
from fedel_coordinator.news import News
from fedel_coordinator.rundir import RunDirectory
from fedel_coordinator.saved import plan_from_text, report_to_text, spec_from_text, state_from_text
from fedel_coordinator.shards import Shards
from fedel_coordinator.store import CLOSED, OPEN, SEALED, ReportRow, RoundRow, RunRow, Store

log = logging.getLogger(__name__)

WAITING, RUNNING, PAUSED, STOPPING = "waiting", "running", "paused", "stopping"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
ENDED = (FINISHED, STOPPED, FAILED)
PHASES = {
    WAITING: pb.RUN_PHASE_WAITING,
    RUNNING: pb.RUN_PHASE_RUNNING,
    STOPPING: pb.RUN_PHASE_RUNNING,
    PAUSED: pb.RUN_PHASE_PAUSED,
    FINISHED: pb.RUN_PHASE_FINISHED,
    STOPPED: pb.RUN_PHASE_STOPPED,
    FAILED: pb.RUN_PHASE_FAILED,
}


@dataclass(frozen=True)
class Tools:
    """What the runs of one coordinator share."""

    store: Store
    fleet: Fleet
    shards: Shards
    metrics: CoordinatorMetrics
    clock: Callable[[], float] = time.time
    """Unix seconds, for what is written down; how long things take is told by the event loop."""
    runs_dir: Path | None = None

    def directory(self, run: str) -> RunDirectory | None:
        return RunDirectory(self.runs_dir / run) if self.runs_dir else None


@dataclass
class OpenRound:
    """The round under way."""

    round_num: int
    status: str
    plan: Plan
    opened_at: float
    deadline: float
    """On the event loop's clock, which starts anew with the process: an outage is not held against clients."""
    sealed_at: float = 0.0
    record: dict[str, Any] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    """Clients that will not deliver, and why."""

    def __post_init__(self) -> None:
        self.tasks: Mapping[str, Task] = {task.client: task for task in self.plan.tasks}


@dataclass
class Evaluation:
    """A model that somebody is to evaluate."""

    version: int
    evaluator: str = ""
    unfit: set[str] = field(default_factory=set)
    result: pb.EvaluationDone | None = None


class Run:
    """The run's state; whatever changes it says so through ``news``."""

    def __init__(self, row: RunRow, tools: Tools, members: Members) -> None:
        self.row = row
        self.name = row.name
        self.tools = tools
        self.config = RunConfig.parse(json.loads(row.config_json), f"run '{row.name}'")
        self.spec = spec_from_text(row.spec_json)
        self.director = Director(self.config, self.spec)
        self.state = state_from_text(row.state_json)
        self.members = members
        self.phase = row.phase
        self.message = row.message
        self.notice = ""
        """What the run waits for at the moment, for people."""
        self.best_accuracy = row.best_accuracy
        self.last_record: dict[str, Any] = {}
        self.round: OpenRound | None = None
        self.evaluation: Evaluation | None = None
        self.news = News()
        self.counts: Counter[str] = Counter()
        self.directory = tools.directory(row.name)
        self._writing_phase = asyncio.Lock()

    @staticmethod
    async def load(row: RunRow, tools: Tools) -> Run:
        """The run as the store knows it."""
        rows = await asyncio.to_thread(tools.store.clients, row.name)
        run = Run(row, tools, Members(tools.fleet, rows))
        last = await asyncio.to_thread(tools.store.last_round, row.name)
        if last is not None:
            run.last_record = json.loads(last.record_json)
        if last is not None and last.status != CLOSED:
            if last.status in (OPEN, SEALED):
                before = await asyncio.to_thread(tools.store.round, row.name, last.round_num - 1)
                run.last_record = json.loads(before.record_json) if before else {}
            plan = plan_from_text(last.plan_json, run.state.global_importance)
            reports = await asyncio.to_thread(tools.store.reports, row.name, last.round_num)
            run.begin(last, plan, {report.client for report in reports})
        return run

    @property
    def ended(self) -> bool:
        return self.phase in ENDED

    @property
    def about(self) -> dict[str, Any]:
        """Fields of a log line."""
        return {"run": self.name, "round": self.state.round_num}

    def begin(self, row: RoundRow, plan: Plan, done: set[str]) -> OpenRound:
        """Take up a round, new or kept in the store."""
        deadline = asyncio.get_running_loop().time() + plan.deadline_seconds
        self.round = OpenRound(
            row.round_num,
            row.status,
            plan,
            row.opened_at,
            deadline,
            row.sealed_at or 0.0,
            json.loads(row.record_json),
            done & {task.client for task in plan.tasks},
        )
        return self.round

    async def set_phase(self, phase: str, message: str = "") -> None:
        self.phase, self.message = phase, message
        async with self._writing_phase:
            ended_at = self.tools.clock() if self.ended else None
            await asyncio.to_thread(self.tools.store.set_phase, self.name, self.phase, self.message, ended_at)
        self.news.notify()

    def write(self, how: Callable[[RunDirectory], None]) -> None:
        """To the run's directory, if it has one. Trouble there stops nothing: the store has it all."""
        if self.directory is not None:
            try:
                how(self.directory)
            except OSError as error:
                log.error("cannot write to %s: %s", self.directory.path, error, extra=self.about)

    async def control(self, action: pb.RunAction.ValueType) -> None:
        """Pause, resume or stop; what is so already stays so."""
        if action == pb.RUN_ACTION_STOP and not self.ended:
            await self.set_phase(STOPPING, "stops after the open round")
        elif self.ended or self.phase == STOPPING:
            if action != pb.RUN_ACTION_STOP:
                raise ServiceError(f"run '{self.name}' is {self.phase}: create a new run to train on")
        elif action == pb.RUN_ACTION_PAUSE:
            await self.set_phase(PAUSED)
        elif action == pb.RUN_ACTION_RESUME and self.phase == PAUSED:
            begun = self.round is not None or self.state.round_num > 0
            await self.set_phase(RUNNING if begun else WAITING)

    async def joined(self, session: Session, join: pb.Join) -> None:
        """An agent is ready, for the first time or again; what it missed is sent to it."""
        if self.ended:
            session.push(self.farewell())
            return
        if reason := objection(join, self.spec):
            self.counts["refused:join"] += 1
            self.tools.metrics.refused.labels("join").inc()
            log.warning("refused %s: %s", session.client, reason, extra=self.about | {"client": session.client})
            session.push(pb.SessionResponse(refused=pb.JoinRefused(run=self.name, reason=reason)))
            return
        row = row_of(self.name, session.client, session.device, join, self.tools.clock())
        await asyncio.to_thread(self.tools.store.put_client, row)
        self.members.put(row)
        log.info("%s joined", session.client, extra=self.about | {"client": session.client})
        session.joined.add(self.name)
        if self.round is not None and session.client in self.round.tasks:
            self.round.lost.pop(session.client, None)
            self.send_task(session.client)
        self.news.notify()

    async def left(self, client: str) -> None:
        """An agent said goodbye: nobody waits for it."""
        if self.members.get(client) is None:
            return
        self.members.leave(client)
        self._lose(client, "it left")
        await asyncio.to_thread(self.tools.store.set_left, self.name, client, self.tools.clock())

    def disconnected(self, client: str) -> None:
        """A stream ended, one way or another."""
        if self.evaluation is not None and self.evaluation.evaluator == client:
            self.evaluation.evaluator = ""
        self.news.notify()

    def answered(self, client: str, answer: pb.TaskAnswer) -> None:
        if not answer.accepted and self.round is not None and answer.round_num == self.round.round_num:
            self._lose(client, f"it declined: {answer.reason}")

    def progressed(self, client: str, progress: pb.TaskProgress) -> None:
        member = self.members.get(client)
        if member is None or self.round is None or progress.round_num != self.round.round_num:
            return
        member.phase = progress.phase
        if progress.window.front_block:
            member.window.CopyFrom(progress.window)
        self.news.notify()

    async def finished(self, session: Session, done: pb.TaskDone) -> None:
        """A task is done. The aggregators say which updates count; this tells when to ask them."""
        client, report = session.client, report_from_pb(done.report)
        newest = self.round.round_num if self.round else self.state.round_num - 1
        if report.client != client or not 0 <= report.round_num <= newest:
            self.counts["refused:done"] += 1
            self.tools.metrics.refused.labels("done").inc()
            log.warning(
                "ignored a task of %s, round %d", report.client, report.round_num, extra={"client": client}
            )
            return
        await asyncio.to_thread(self.tools.store.put_report, _report_row(self.name, report, done))
        if member := self.members.get(client):
            task = self.round.tasks.get(client) if self.round else None
            member.phase = "done"
            member.window.CopyFrom(done.report.window)
            member.train_seconds = report.train_seconds
            member.budget_seconds = task.budget_seconds * max(1, report.num_steps) if task else 0.0
            member.bytes_up, member.bytes_down = done.bytes_up, done.bytes_down
        if report.round_num < self.state.round_num:
            session.push(self.closed_message(report.round_num, client))
        if self.round is not None and self.round.status == OPEN and self._counts_now(report):
            self.round.done.add(client)
            self.round.lost.pop(client, None)
        self.news.notify()

    def failed(self, client: str, failure: pb.TaskFailed) -> None:
        self.counts["failed"] += 1
        self.tools.metrics.tasks_failed.labels(self.name).inc()
        log.warning("%s failed: %s", client, failure.message, extra=self.about | {"client": client})
        if failure.round_num >= 0:
            if self.round is not None and failure.round_num == self.round.round_num:
                self._lose(client, failure.message)
        elif self.evaluation is not None and self.evaluation.evaluator == client:
            self.evaluation.unfit.add(client)
            self.evaluation.evaluator = ""
            self.news.notify()
        else:
            self.members.leave(client)
            self._lose(client, failure.message)

    def evaluated(self, done: pb.EvaluationDone) -> None:
        if self.evaluation is not None and done.model_version == self.evaluation.version:
            self.evaluation.result = done
            self.news.notify()

    def send_task(self, client: str) -> None:
        """The client's task of the open round, unless it is done."""
        now = self.round
        if now is None or now.status != OPEN or client in now.done:
            return
        last = self.state.reports.get(client)
        task = task_to_pb(
            now.tasks[client],
            self.name,
            self.spec,
            model_version=now.round_num,
            accepted_round=last.round_num if last else -1,
            memory=memory_of(last),
            deadline_seconds=max(0.0, now.deadline - asyncio.get_running_loop().time()),
        )
        self.tools.fleet.push(client, self.name, pb.SessionResponse(task=task))

    def closed_message(self, round_num: int, client: str) -> pb.SessionResponse:
        last = self.state.reports.get(client)
        counted = last is not None and last.round_num == round_num
        closed = pb.RoundClosed(
            run=self.name, round_num=round_num, model_version=round_num + 1, counted=counted
        )
        return pb.SessionResponse(closed=closed)

    def farewell(self) -> pb.SessionResponse:
        return pb.SessionResponse(ended=pb.RunEnded(run=self.name, phase=PHASES[self.phase]))

    def _counts_now(self, report: Report) -> bool:
        """Whether the report's update is for the open round, or was late and goes into it."""
        assert self.round is not None
        if report.round_num == self.round.round_num:
            return report.client in self.round.tasks
        last = self.state.reports.get(report.client)
        in_time = last is not None and last.round_num >= report.round_num
        return (
            self.config.rounds.late == "next"
            and report.round_num == self.round.round_num - 1
            and report.client in self.round.tasks
            and not in_time
        )

    def _lose(self, client: str, why: str) -> None:
        """Do not wait for the client in the open round."""
        now = self.round
        if now is not None and now.status == OPEN and client in now.tasks and client not in now.done:
            now.lost[client] = why
        self.news.notify()


def _report_row(run: str, report: Report, done: pb.TaskDone) -> ReportRow:
    phases = done.phases
    device = json_format.MessageToDict(done.device, preserving_proto_field_name=True)
    return ReportRow(
        run=run,
        round_num=report.round_num,
        client=report.client,
        report_json=report_to_text(report),
        phases_json=json.dumps(
            {
                "download": phases.download,
                "train": phases.train,
                "upload": phases.upload,
                "wait": phases.wait,
            }
        ),
        device_json=json.dumps(device),
        bytes_up=done.bytes_up,
        bytes_down=done.bytes_down,
    )
