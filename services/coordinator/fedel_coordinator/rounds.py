"""The rounds of one run as a state machine: open, sealed, committed, closed, and from the start again.

Each step ends with a transaction that says how far the round is, so that a process that dies anywhere goes on
from the last one: what was done since is done again, and the aggregators give the same answers again.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

from fedel.errors import FedelError, ServiceError
from fedel.types import Report, Task
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.channel import backoff_seconds
from fedel_coordinator.records import Closing, round_record, run_result
from fedel_coordinator.run import (
    FAILED,
    FINISHED,
    PAUSED,
    RUNNING,
    STOPPED,
    STOPPING,
    WAITING,
    Evaluation,
    OpenRound,
    Run,
)
from fedel_coordinator.rundir import RunDirectory
from fedel_coordinator.saved import plan_from_text, plan_to_text, record_to_text, state_to_text
from fedel_coordinator.shards import Interrupted, Trouble
from fedel_coordinator.store import COMMITTED, OPEN, SEALED, RoundRow, StoreUnavailable

log = logging.getLogger(__name__)


async def drive(run: Run) -> None:
    """Take the run from wherever it stands to its end."""
    attempt = 0
    fate: tuple[str, str] | None = None
    while not run.ended:
        try:
            if fate is not None:
                await _end(run, *fate)
            else:
                await _step(run)
            attempt = 0
        except StoreUnavailable as error:
            log.warning("%s; trying again", error, extra=run.about)
            run.notice = "the database does not answer; trying again until it does"
            await asyncio.sleep(backoff_seconds(attempt))
            attempt += 1
        except Interrupted:
            fate = (STOPPED, f"stopped in round {run.state.round_num}, which was not closed")
        except FedelError as error:
            fate = (FAILED, str(error))
        except Exception as error:
            log.exception("round failed", extra=run.about)
            fate = (FAILED, f"round {run.state.round_num}: {type(error).__name__}: {error}; see the log")


async def _step(run: Run) -> None:
    now = run.round
    if now is None:
        await _open(run)
    elif now.status == OPEN:
        await _collect(run, now)
    elif now.status == SEALED:
        await _commit(run, now)
    else:
        await _finish(run, now)


async def _open(run: Run) -> None:
    """Plan the next round once enough clients are there; the plan is kept before anybody hears of it."""
    if run.state.round_num >= run.config.rounds.num_rounds:
        await _end(run, FINISHED)
        return
    await run.news.until(lambda: _may_open(run))
    if run.phase == STOPPING:
        await _end(run, STOPPED)
        return
    views = [member.view for member in run.members.present()]
    plan = await asyncio.to_thread(run.director.plan, run.state, views)
    if not plan.tasks:
        raise ServiceError(f"strategy '{run.director.strategy.name}' planned no task for {len(views)} clients")
    if not _may_open(run):
        return
    if run.phase == WAITING:
        await run.set_phase(RUNNING)
    row = RoundRow(run.name, run.state.round_num, OPEN, plan_to_text(plan), run.tools.clock())
    await asyncio.to_thread(run.tools.store.put_round, row)
    # As a restart would read it, so that a run goes on the same way with and without one.
    plan = plan_from_text(row.plan_json, run.state.global_importance)
    for member in run.members:
        member.phase = "idle"
    for client in run.begin(row, plan, set()).tasks:
        run.send_task(client)
    run.news.notify()


def _may_open(run: Run) -> bool:
    """Whether to go on, after writing down for people what is missing."""
    present = len(run.members.present())
    missing = (run.config.rounds.min_clients if run.state.round_num == 0 else 1) - present
    run.notice = f"waits for {missing} more client{'s'[: missing > 1]}" if missing > 0 else ""
    return run.phase == STOPPING or (run.phase != PAUSED and missing <= 0)


async def _collect(run: Run, now: OpenRound) -> None:
    """Wait until enough clients are back, or for the deadline; with too few even then, go on waiting."""
    rounds = run.config.rounds
    loop = asyncio.get_running_loop()
    warned = False
    while not await run.news.until(lambda: _enough(run, now), now.deadline - loop.time()):
        if len(now.done) >= rounds.min_reports:
            break
        if run.phase == STOPPING:
            raise Interrupted
        run.notice = f"{len(now.done)} of {rounds.min_reports} reports at the deadline; waits for more"
        if not warned:
            log.warning("round %d: %s", now.round_num, run.notice, extra=run.about)
            warned = True
        now.deadline = loop.time() + now.plan.deadline_seconds
        await _reinforce(run, now)
        run.news.notify()
    sealed_at = run.tools.clock()
    await asyncio.to_thread(run.tools.store.seal_round, run.name, now.round_num, sealed_at)
    now.status, now.sealed_at, run.notice = SEALED, sealed_at, ""
    run.news.notify()


def _enough(run: Run, now: OpenRound) -> bool:
    expected = len(now.tasks) - len(now.lost)
    enough = run.director.enough(len(now.done), expected)
    return enough and len(now.done) >= run.config.rounds.min_reports


async def _reinforce(run: Run, now: OpenRound) -> None:
    """Give the round's work to clients that are there and have none: those it was given to may be gone."""
    busy = now.tasks.keys() - now.lost.keys()
    idle = [m.view for m in run.members.present() if m.view.name not in busy]
    if not idle:
        return
    more = (await asyncio.to_thread(run.director.plan, run.state, idle)).tasks
    fresh = {task.client for task in more}
    tasks = tuple(task for task in now.plan.tasks if task.client not in fresh) + more
    plan = replace(now.plan, tasks=tasks)
    row = RoundRow(run.name, now.round_num, OPEN, plan_to_text(plan), now.opened_at)
    await asyncio.to_thread(run.tools.store.put_round, row)
    now.plan, now.tasks = plan, {task.client: task for task in tasks}
    for client in fresh:
        now.lost.pop(client, None)
        run.send_task(client)


async def _commit(run: Run, now: OpenRound) -> None:
    """Have the aggregators make the next model of every update that all of them have."""
    trouble = _trouble(run)
    reports = await run.tools.shards.seal(run.name, now.round_num, trouble)
    clients = [report.client for report in reports]
    committed = await run.tools.shards.commit(run.name, now.round_num, clients, trouble)
    if committed.version != now.round_num + 1:
        raise ServiceError(
            f"run '{run.name}': the aggregators made version {committed.version} of round {now.round_num}:"
            " they hold another run of this name; create it under a new one"
        )
    told = await asyncio.to_thread(run.tools.store.reports, run.name, now.round_num)
    told_late, late_tasks = await _late(run, now, reports)
    closing = Closing(
        plan=now.plan,
        reports=reports,
        late_tasks=late_tasks,
        told={row.client: row for row in told} | told_late,
        device_types={client: run.members.device_type(client) for client in clients},
        committed=committed,
        before=run.last_record,
        opened_at=now.opened_at,
        sealed_at=now.sealed_at,
        committed_at=run.tools.clock(),
    )
    record = await asyncio.to_thread(round_record, run.director, run.state, closing)
    order = {t.name: committed.global_importance.get(t.name, 0.0) for t in run.spec.tensors}
    state = run.director.close(run.state, now.plan, reports, order)
    await asyncio.to_thread(
        run.tools.store.commit_round,
        run.name,
        now.round_num,
        record_to_text(record),
        state_to_text(state),
        committed.version,
    )
    run.state, run.last_record = state, record
    now.status, now.record = COMMITTED, record
    for client in now.tasks.keys() | set(clients):
        run.tools.fleet.push(client, run.name, run.closed_message(now.round_num, client))
    run.news.notify()


async def _late(run: Run, now: OpenRound, reports: list[Report]) -> tuple[dict[str, Any], dict[str, Task]]:
    """What clients told of late updates that count in this round, and their tasks of the round before."""
    late = {report.client for report in reports if report.round_num == now.round_num - 1}
    before = await asyncio.to_thread(run.tools.store.round, run.name, now.round_num - 1) if late else None
    if before is None:
        return {}, {}
    plan = plan_from_text(before.plan_json, {})
    told = await asyncio.to_thread(run.tools.store.reports, run.name, now.round_num - 1)
    return (
        {row.client: row for row in told if row.client in late},
        {task.client: task for task in plan.tasks if task.client in late},
    )


async def _finish(run: Run, now: OpenRound) -> None:
    """Evaluate the new model if it is time, and complete the round's record."""
    rounds = run.config.rounds
    last = now.round_num + 1 == rounds.num_rounds
    due = rounds.evaluate_every > 0 and (last or (now.round_num + 1) % rounds.evaluate_every == 0)
    result = await _evaluate(run, now) if due else None
    record = now.record | {"accuracy": None, "test_loss": None, "evaluate_seconds": None}
    best = None
    if result is not None:
        record |= {
            "accuracy": result.accuracy,
            "test_loss": result.loss,
            "evaluate_seconds": result.seconds,
            "phases": now.record["phases"] | {"evaluate": result.seconds},
        }
        if run.best_accuracy is None or result.accuracy > run.best_accuracy:
            best = (result.model_version, result.accuracy)
            await run.tools.shards.keep(run.name, result.model_version, "best", _trouble(run))
    text = record_to_text(record)
    await asyncio.to_thread(run.tools.store.close_round, run.name, now.round_num, text, run.tools.clock(), best)
    run.best_accuracy = best[1] if best else run.best_accuracy
    run.round, run.evaluation, run.last_record = None, None, record
    run.tools.metrics.observe_round(run.name, record, run.spec.num_bytes)
    if result is not None:
        run.tools.metrics.observe_evaluation(run.name, result.accuracy, result.loss)
    await asyncio.to_thread(run.write, lambda directory: directory.append(text))
    log.info("%s", _line(record), extra={"run": run.name, "round": now.round_num})
    run.news.notify()


async def _evaluate(run: Run, now: OpenRound) -> pb.EvaluationDone | None:
    """What a client that holds test data makes of the new model; ``None`` if nobody does in time."""
    run.evaluation = Evaluation(now.round_num + 1)
    timeout = now.plan.deadline_seconds
    await run.news.until(lambda: _asked(run, run.evaluation), timeout)
    result = run.evaluation.result
    if result is None:
        run.counts["evaluation:skipped"] += 1
    return result


def _asked(run: Run, evaluation: Evaluation | None) -> bool:
    """Have the fastest client evaluate that can; true once there is a result, or nobody to wait for."""
    if evaluation is None or evaluation.result is not None:
        return True
    able = [client for client in run.members.evaluators() if client not in evaluation.unfit]
    if not evaluation.evaluator:
        ready = (client for client in able if run.tools.fleet.ready(client, run.name))
        evaluation.evaluator = next(ready, "")
        task = pb.EvaluationTask(run=run.name, model_version=evaluation.version)
        run.tools.fleet.push(evaluation.evaluator, run.name, pb.SessionResponse(evaluate=task))
    return not able


async def _end(run: Run, phase: str, message: str = "") -> None:
    """The run is over: write the result, tell everybody."""
    run.round, run.evaluation, run.notice = None, None, ""
    await run.set_phase(phase, message)
    level = logging.ERROR if phase == FAILED else logging.INFO
    log.log(level, "run '%s' %s. %s", run.name, phase, message, extra=run.about)
    for member in run.members:
        run.tools.fleet.push(member.row.client, run.name, run.farewell())
    await asyncio.to_thread(run.write, lambda directory: write_result(run, directory))
    run.news.notify()


def write_result(run: Run, directory: RunDirectory) -> None:
    row = run.tools.store.run(run.name)
    if row is not None:
        records = [json.loads(text) for text in run.tools.store.records(run.name)]
        directory.finish(run_result(row, run.director, records))


def _trouble(run: Run) -> Trouble:
    def tell(notice: str) -> None:
        run.notice = notice
        run.news.notify()

    return Trouble(tell, lambda: run.phase == STOPPING)


def _line(record: dict[str, Any]) -> str:
    loss = "-" if record["loss"] is None else f"{record['loss']:.4f}"
    tested = "" if record["accuracy"] is None else f", accuracy {record['accuracy']:.4f}"
    return (
        f"round {record['round']}: {record['num_updates']} of {record['num_tasks']} updates,"
        f" {record['latency_seconds']:.2f} s, loss {loss}{tested}"
    )
