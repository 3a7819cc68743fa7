"""The coordinator's gRPC service: agents' sessions, and the calls that create, control and watch runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fedel_services.guard import caller
from grpc import aio

from fedel.errors import ConfigError
from fedel.roles.gate import clean
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from fedel.wire.codec import spec_from_pb
from fedel.wire.watch import MAX_LETTERS, in_parts
from fedel_coordinator import messages
from fedel_coordinator.agent_calls import control_agent, list_agents
from fedel_coordinator.agent_sessions import AgentSessions
from fedel_coordinator.change_signal import rest_seconds, wait_for_event
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.dry_run import plan_run
from fedel_coordinator.errors import AggregatorAway, NoSuchRun, RunActive, Stopping
from fedel_coordinator.run_view import ShownRun
from fedel_coordinator.status import client_status, run_status

log = logging.getLogger(__name__)

REST_SECONDS = 0.1
"""A follower receives changes at most this often."""
BATCH_BYTES = 1024 * 1024
"""Of one page of runs."""
BATCH_ROUNDS = 200
MAX_AGENTS = 100
"""Names of connected agents in a list of runs."""


class CoordinatorServicer(CoordinatorServiceServicer):
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._sessions = AgentSessions(coordinator)

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await self._sessions.serve(request_iterator, context)

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:  # noqa: ARG002
        try:
            run = await self._coordinator.create(request.run, request.config_json, spec_from_pb(request.spec))
        except aio.AioRpcError as error:
            raise AggregatorAway(
                f"an aggregator does not answer ({error.details()}): start it, then create the run again"
            ) from None
        return pb.CreateRunResponse(status=self._status(run))

    async def ControlRun(self, request: pb.ControlRunRequest, context: Any) -> pb.ControlRunResponse:  # noqa: ARG002
        run = await self._find(request.run)
        action = messages.ACTIONS.get(request.action)
        if action is None:
            raise ConfigError("no action: choose pause, resume, stop or stop now")
        known = caller()
        by = str(known.facts.identity) if known else ""
        await run.control(action, by, clean(request.why, messages.MAX_WHY))
        return pb.ControlRunResponse(status=self._status(run))

    async def DeleteRuns(self, request: pb.DeleteRunsRequest, context: Any) -> pb.DeleteRunsResponse:  # noqa: ARG002
        older = request.older_than_seconds if request.HasField("older_than_seconds") else None
        found = await self._coordinator.housekeeper.delete(request.runs, older, request.dry_run)
        return pb.DeleteRunsResponse(runs=[pb.DeletedRun(**asdict(each)) for each in found])

    async def GetResult(self, request: pb.GetResultRequest, context: Any) -> pb.GetResultResponse:  # noqa: ARG002
        run = await self._find(request.run)
        if not run.ended:
            raise RunActive(f"run '{run.name}' is not over: its result comes with its end")
        return pb.GetResultResponse(result_json=await self._coordinator.result(run.name))

    async def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:  # noqa: ARG002
        runs = (await self._coordinator.shown_runs())[max(0, request.offset) :]
        page, size = list[pb.RunStatus](), 0
        for run in runs:
            status = self._status(run)
            size += status.ByteSize()
            if page and size > BATCH_BYTES:
                break
            page.append(status)
        agents = sorted(self._coordinator.sessions.clients)
        return pb.ListRunsResponse(
            runs=page, more=len(page) < len(runs), num_agents=len(agents), agents=agents[:MAX_AGENTS]
        )

    async def WatchRun(self, request: pb.WatchRunRequest, context: Any) -> AsyncIterator[pb.WatchRunResponse]:  # noqa: ARG002
        run = await self._find(request.run)
        sent = request.first_round
        if sent < 0:
            sent = max(0, run.view().rounds_closed + sent)
        while True:
            change = run.change.next()
            ended = run.ended
            records = await self._records(run.name, sent)
            sent += len(records)
            begin = time.thread_time()
            parts = list(in_parts(self._status(run), await self._clients(run), records))
            rest = rest_seconds(REST_SECONDS, time.thread_time() - begin)
            for part in parts:
                yield part
            if self._coordinator.stopping and not ended:
                raise Stopping("the coordinator is stopping; the run goes on after its next start")
            if ended and not records:
                return
            if not records:
                await self._rest(change, rest)

    async def _rest(self, change: asyncio.Event, seconds: float) -> None:
        """Until something changed; from time to time anyway, because silence grows without any change."""
        changed = await wait_for_event(change, self._coordinator.config.heartbeat_seconds)
        if changed and not self._coordinator.stopping:
            await asyncio.sleep(seconds)

    async def _records(self, run: str, start: int) -> list[str]:
        """The next closed rounds, as many as go into one message."""
        texts = await asyncio.to_thread(self._coordinator.store.records, run, start, BATCH_ROUNDS)
        taken: list[str] = []
        size = 0
        for text in texts:
            size += len(text)
            if taken and size > MAX_LETTERS:
                break
            taken.append(text)
        return taken

    async def ListAggregators(
        self,
        request: pb.ListAggregatorsRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.ListAggregatorsResponse:
        return pb.ListAggregatorsResponse(addresses=self._coordinator.config.reachable)

    async def ListAgents(self, request: pb.ListAgentsRequest, context: Any) -> pb.ListAgentsResponse:  # noqa: ARG002
        return list_agents(self._coordinator, request)

    async def ControlAgent(self, request: pb.ControlAgentRequest, context: Any) -> pb.ControlAgentResponse:  # noqa: ARG002
        return await control_agent(self._coordinator, request)

    async def PlanRun(self, request: pb.PlanRunRequest, context: Any) -> pb.PlanRunResponse:  # noqa: ARG002
        spec = spec_from_pb(request.spec)
        return pb.PlanRunResponse(plan_json=await plan_run(self._coordinator, request, spec))

    async def _find(self, name: str) -> ShownRun:
        """The run; without a name the newest that is not over, or else the newest."""
        run = await self._coordinator.find(name)
        if run is None:
            raise NoSuchRun(f"no run '{name}' here; `fedel runs` lists them" if name else "there is no run yet")
        return run

    def _status(self, run: ShownRun) -> pb.RunStatus:
        return run_status(run.view(), self._coordinator.clock())

    async def _clients(self, run: ShownRun) -> list[pb.ClientStatus]:
        """Those of a live run; those of an ended run are in its records."""
        clients = [] if run.name not in self._coordinator.runs else (await run.clients()).values()
        return [client_status(client) for client in clients]
