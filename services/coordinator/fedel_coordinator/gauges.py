"""Gauges that tell how things are now, set when somebody looks; what happens is counted where it happens."""

from __future__ import annotations

import asyncio

from fedel.telemetry import CoordinatorMetrics
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.run import RUNNING, STOPPING, Run

KEEP_SECONDS = 600.0
"""A run that is over keeps its time series so long: enough for any scrape interval to see its end."""


class Gauges:
    """What a scrape of the coordinator refreshes."""

    def __init__(self, coordinator: Coordinator, metrics: CoordinatorMetrics) -> None:
        self._coordinator, self._metrics = coordinator, metrics
        self._ended: dict[str, float] = {}
        """When a run was first seen to be over, on the event loop's clock; infinity once it is forgotten."""

    def refresh(self) -> None:
        self._metrics.sessions.set(self._coordinator.fleet.num_sessions)
        for run in self._coordinator.runs.values():
            if not run.ended:
                self._show(run)
            elif run.name not in self._ended:
                self._show(run)
                self._ended[run.name] = asyncio.get_running_loop().time()
        self._forget()

    def _show(self, run: Run) -> None:
        metrics, now = self._metrics, run.round
        metrics.run_active.labels(run.name).set(run.phase in (RUNNING, STOPPING))
        metrics.round_number.labels(run.name).set(now.round_num if now else run.state.round_num)
        metrics.round_started.labels(run.name).set(now.opened_at if now else 0)
        if now is not None:
            metrics.round_deadline.labels(run.name).set(now.plan.deadline_seconds)
            metrics.budget.labels(run.name).set(now.plan.tasks[0].budget_seconds)
        self._show_clients(run)

    def _show_clients(self, run: Run) -> None:
        """Who is expected and was heard when. One that left, or whose run is over, is not missed."""
        seen, clock = self._metrics.client_seen, run.tools.clock()
        if run.ended:
            seen.remove_by_labels({"run": run.name})
            return
        for member in run.members:
            client = member.row.client
            if not self._metrics.labelled(run.name, client):
                continue
            if member.row.has_left:
                seen.remove_by_labels({"run": run.name, "client": client})
            else:
                seen.labels(run.name, client).set(clock - run.tools.fleet.silent_for(client))

    def _forget(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, ended in self._ended.items():
            if now - ended > KEEP_SECONDS:
                self._metrics.forget(name)
                self._ended[name] = float("inf")
