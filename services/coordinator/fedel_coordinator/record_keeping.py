"""What is written down and counted about a run. Trouble here is shown, and keeps no round from closing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fedel.records import RoundRecord, RunResult, run_result
from fedel.roles.planner import RoundPlanner
from fedel.telemetry import CoordinatorMetrics
from fedel_coordinator.run_directory import RunDirectory
from fedel_coordinator.store import RunRow, Store, each_record
from fedel_coordinator.traces import Traces

log = logging.getLogger(__name__)


class RecordKeeper:
    """Of one run; ``show`` receives what people should know, an empty text when all is well again."""

    def __init__(
        self,
        row: RunRow,
        planner: RoundPlanner,
        store: Store,
        metrics: CoordinatorMetrics,
        directory: RunDirectory | None,
        show: Callable[[str], None],
        traces: Traces | None = None,
    ) -> None:
        self.directory = directory
        self._row, self._planner, self._store, self._metrics = row, planner, store, metrics
        self._show, self._traces = show, traces

    async def close(self, record: RoundRecord) -> None:
        """A round is closed."""
        fields = {"run": self._row.name, "round": record.round}
        log.info("%s", _line(record), extra=fields)
        trouble = record.trouble and f"round {record.round + 1}: {record.trouble}"
        if trouble:
            log.error("%s", trouble, extra=fields)
        try:
            self._count(record)
        except Exception as error:
            log.exception("round %d could not be counted in the metrics", record.round, extra=fields)
            trouble = f"round {record.round + 1} is not in the metrics: {type(error).__name__}: {error}"
        await self._trace(record)
        trouble = await self.write(lambda directory: directory.append(record.to_json())) or trouble
        self._show(trouble or over_budget(record))

    async def _trace(self, record: RoundRecord) -> None:
        if self._traces is not None:
            try:
                await asyncio.to_thread(self._traces.round_closed, self._row.name, record)
            except Exception:
                log.exception("round %d has no trace", record.round, extra={"run": self._row.name})

    def _count(self, record: RoundRecord) -> None:
        name = self._row.name
        self._metrics.observe_round(name, record, self._planner.spec.num_bytes)
        if record.accuracy is not None and record.test_loss is not None:
            self._metrics.observe_evaluation(name, record.accuracy, record.test_loss)
        if record.client_tests is not None:
            self._metrics.observe_own_tests(name, record.client_tests)

    async def write_result(self) -> None:
        await self.write(lambda directory: directory.finish(self.result()))

    async def write(self, how: Callable[[RunDirectory], None]) -> str:
        """To the run's directory, if it has one; returns what went wrong. The store has everything anyway."""
        if self.directory is None:
            return ""
        try:
            await asyncio.to_thread(how, self.directory)
        except Exception as error:
            log.exception("cannot write to %s", self.directory.path, extra={"run": self._row.name})
            return f"cannot write to {self.directory.path} ({error}); the run goes on, the database has it all"
        return ""

    def result(self) -> RunResult:
        """What the run came to, from the store; blocks."""
        row = self._store.run(self._row.name) or self._row
        return run_result(
            name=row.name,
            phase=row.phase,
            message=row.message,
            strategy=self._planner.strategy.name,
            seed=self._planner.run.seed,
            scope=self._planner.scope,
            weights=[tensor.name for tensor in self._planner.spec.weights],
            records=(RoundRecord.from_json(text) for text in each_record(self._store, row.name)),
            wall_seconds=max(0.0, (row.ended_at or row.created_at) - row.created_at),
            model_version=row.model_version,
            average=self._planner.run.server.average,
        )


def over_budget(record: RoundRecord) -> str:
    """A warning if T_th is too small for most clients, so that they train next to nothing."""
    over = sorted(entry.client for entry in record.clients if entry.over_budget)
    if 2 * len(over) <= len(record.clients):
        return ""
    return (
        f"round {record.round + 1}: {len(over)} of {len(record.clients)} clients are over budget at T_th"
        f" {1000 * record.budget_seconds:.3g} ms per step: see the fastest client's timing profile, or set"
        " budget.policy"
    )


def _line(record: RoundRecord) -> str:
    loss = "-" if record.loss is None else f"{record.loss:.4f}"
    tested = "" if record.accuracy is None else f", accuracy {record.accuracy:.4f}"
    return (
        f"round {record.round}: {record.num_updates} of {record.num_tasks} updates{record.late_note},"
        f" {record.latency_seconds:.2f} s, loss {loss}{tested}"
    )
