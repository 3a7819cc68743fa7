"""Gauges of the current state, set at each scrape; events are counted where they happen."""

from __future__ import annotations

import asyncio

from fedel.roles.run_state import RUNNING, STOPPING
from fedel.telemetry import CoordinatorMetrics
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.run import CoordinatorRun

KEEP_SECONDS = 600.0
"""A run that is over keeps its time series this long, so that every scrape interval sees its end."""


class Gauges:
    """What a scrape of the coordinator refreshes."""

    def __init__(self, coordinator: Coordinator, metrics: CoordinatorMetrics) -> None:
        self._coordinator, self._metrics = coordinator, metrics
        self._ended: dict[str, float] = {}
        """When a run was first seen to be over, on the loop's clock; infinity once its series are dropped."""

    def refresh(self) -> None:
        self._metrics.sessions.set(self._coordinator.sessions.num_sessions)
        self._ended = {name: at for name, at in self._ended.items() if name in self._coordinator.runs}
        for run in self._coordinator.runs.values():
            if not run.ended:
                self._show(run)
            elif run.name not in self._ended:
                self._show(run)
                self._ended[run.name] = asyncio.get_running_loop().time()
        self._forget()

    def _show(self, run: CoordinatorRun) -> None:
        metrics, state, open_round = self._metrics, run.state, run.state.open
        metrics.run_active.labels(run.name).set(state.phase in (RUNNING, STOPPING))
        round_num = open_round.round_num if open_round else state.handover.round_num
        metrics.round_number.labels(run.name).set(round_num)
        metrics.round_started.labels(run.name).set(open_round.opened_at if open_round else 0)
        if open_round is not None:
            metrics.round_deadline.labels(run.name).set(open_round.plan.deadline_seconds)
            metrics.budget.labels(run.name).set(open_round.plan.tasks[0].budget_seconds)
        self._show_clients(run)

    def _show_clients(self, run: CoordinatorRun) -> None:
        """When each client was last heard; without those that left, and without runs that are over."""
        seen, clock = self._metrics.client_seen, self._coordinator.clock()
        if run.ended:
            seen.remove_by_labels({"run": run.name})
            return
        for client, member in run.state.members.items():
            if not self._metrics.labelled(run.name, client):
                continue
            if member.has_left:
                seen.remove_by_labels({"run": run.name, "client": client})
            else:
                seen.labels(run.name, client).set(clock - self._coordinator.sessions.silent_for(client))

    def _forget(self) -> None:
        now = asyncio.get_running_loop().time()
        for name, ended in self._ended.items():
            if now - ended > KEEP_SECONDS:
                self._metrics.forget(name)
                self._ended[name] = float("inf")
