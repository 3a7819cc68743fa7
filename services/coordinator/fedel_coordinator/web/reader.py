"""Finds runs and agents for the page and describes them."""

from __future__ import annotations

from itertools import islice

from fedel_services.visitors import Problem

from fedel.selectors import Selector
from fedel_coordinator.agent_view import AgentView, views
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.errors import NoSuchAgent
from fedel_coordinator.run_view import ShownRun
from fedel_coordinator.web import views as run_views
from fedel_coordinator.web.rounds import Rounds


class Reader:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.rounds = Rounds(coordinator.store)

    def now(self) -> float:
        return self._coordinator.clock()

    @property
    def heartbeat_seconds(self) -> float:
        return self._coordinator.config.heartbeat_seconds

    async def all(self) -> list[ShownRun]:
        """Newest first."""
        return await self._coordinator.shown_runs()

    async def find(self, name: str) -> ShownRun:
        run = await self._coordinator.find(name)
        if run is None:
            raise Problem(404, f"no run '{name}' here: /api/runs lists all runs")
        return run

    def head(self, run: ShownRun) -> run_views.Json:
        return run_views.head(run.view(), self.now())

    async def clients(self, run: ShownRun) -> dict[str, run_views.Json]:
        return {name: run_views.client(view) for name, view in (await run.clients()).items()}

    async def last_heard(self, run: ShownRun) -> dict[str, float]:
        """When each client was last heard, in whole Unix seconds."""
        now = self.now()
        return {name: round(now - view.silent_seconds) for name, view in (await run.clients()).items()}

    def agents(self, selector: Selector, after: str, limit: int) -> tuple[list[AgentView], bool]:
        """A page of them by name, and whether there are more."""
        names = self._coordinator.fleet.names(after)
        found = list(islice(views(self._coordinator, names, selector), limit + 1))
        return found[:limit], len(found) > limit

    def agent(self, name: str) -> AgentView:
        """With the trace of its last error."""
        try:
            return next(iter(views(self._coordinator, [name], with_trace=True)))
        except NoSuchAgent:
            raise Problem(404, f"no agent '{name}' here: /api/agents lists all agents") from None
