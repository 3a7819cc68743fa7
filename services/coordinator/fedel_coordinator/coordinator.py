"""The coordinator without its server: creates runs, loads them after a restart, drives each in its own task."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Protocol

import grpc
from grpc import aio
from prometheus_client import CollectorRegistry
from sqlalchemy import make_url

from fedel import plugins
from fedel.errors import ConfigError, FedelError, ServiceError
from fedel.job import RunConfig
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_queue import Place
from fedel.roles.run_state import ENDED, HELD, QUEUED, TRIES_AGAIN, WAITING
from fedel.roles.sharding import assign
from fedel.serialisation import parse_json
from fedel.strategies.protection import check_deployable
from fedel.strategies.scopes import on_devices
from fedel.telemetry import CoordinatorMetrics
from fedel.types import ModelSpec
from fedel.v1 import coordinator_pb2 as pb
from fedel_coordinator.config import CoordinatorConfig
from fedel_coordinator.errors import ModelMissing, NameTaken, NoSuchRun
from fedel_coordinator.fleet import Fleet
from fedel_coordinator.housekeeping import Housekeeper
from fedel_coordinator.job_code import code_of, drop_unused
from fedel_coordinator.messages import Message
from fedel_coordinator.persistence import spec_from_json, spec_to_json
from fedel_coordinator.run import CoordinatorRun
from fedel_coordinator.run_queue import RunQueue
from fedel_coordinator.run_services import RunServices, steady_clock
from fedel_coordinator.run_view import EndedRun, LiveRun, ShownRun
from fedel_coordinator.sessions import Session, SessionLimits, Sessions
from fedel_coordinator.shards import Shards, StoppedWaiting
from fedel_coordinator.store import RunRow, Store, each_record
from fedel_coordinator.traces import traces_to

log = logging.getLogger(__name__)
MAX_ENDED_AGAIN = 100
"""Newest runs that the aggregators are told at the start are over."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class DryOffer(Protocol):
    """Takes what agents say about an offer of a run that is never created."""

    def receive(self, session: Session, message: Message) -> None: ...


class Coordinator:
    """All runs of this process, and the services they share."""

    def __init__(
        self,
        config: CoordinatorConfig,
        store: Store,
        shards: Shards,
        monotonic: Callable[[], float] = time.monotonic,
        metrics: CoordinatorMetrics | None = None,
    ) -> None:
        self.config = config
        self.store = store
        self.shards = shards
        self.clock = steady_clock()
        self.metrics = metrics or CoordinatorMetrics(CollectorRegistry())
        limits = SessionLimits(config.max_messages_per_second, config.max_refused_messages)
        self.sessions = Sessions(config.silent_seconds, monotonic, limits)
        self.fleet = Fleet(store, self.sessions, self.clock, config.max_agents)
        self.runs: dict[str, CoordinatorRun] = {}
        """The runs that this process drives or has driven."""
        self.drives: dict[str, asyncio.Task[None]] = {}
        self._queue = RunQueue(self.runs, config.max_active_runs)
        self._creating = asyncio.Lock()
        self.dry_runs: dict[str, DryOffer] = {}
        """Offers of runs that are never created (``dry_run.py``)."""
        self.stopping = False
        self.traces = traces_to(config.traces)
        self._services = RunServices(
            store,
            self.sessions,
            shards,
            self.metrics,
            self.clock,
            config,
            self.fleet,
            config.runs_dir,
            self.traces,
            self._phase_changed,
        )
        self.housekeeper = Housekeeper(self._services, self.runs, self.drives)
        self._pulse: asyncio.Task[None] | None = None
        self._tidying: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on with every run that has not ended."""
        await self.fleet.load()
        self._keeping = asyncio.create_task(self.fleet.keep(), name="fleet")
        self._pulse = asyncio.create_task(self._beat(), name="pulse")
        rows = await asyncio.to_thread(self.store.runs, brief=True)
        if not rows:
            self._warn_of_lost_runs()
        await asyncio.to_thread(drop_unused, self.store, rows)
        ended = [row.name for row in rows if row.phase in ENDED][:MAX_ENDED_AGAIN]
        self._ending = asyncio.create_task(self._end_again(ended), name="end runs again")
        for row in rows:
            if row.phase in ENDED:
                await self._repair_result(row.name)
                continue
            if row.num_shards != len(self.shards.addresses):
                raise ServiceError(
                    f"run '{row.name}' was created on {row.num_shards} aggregators, aggregators lists"
                    f" {len(self.shards.addresses)}: list the same ones, in the same order"
                )
            try:
                run = await self._load(row.name)
            except ConfigError as error:
                # Such as a method that this machine does not allow: the other runs can go on.
                log.error("run '%s' cannot go on: %s", row.name, error, extra={"run": row.name})
                why = f"{error}; after that, start the coordinator again, and {TRIES_AGAIN}"
                await asyncio.to_thread(self.store.set_phase, row.name, HELD, why)
            else:
                for client in run.state.members:
                    await run.settle_member(client)
                await self._start_run(run)
        self._queue.settle()
        limits = self.config.keep_runs_days, self.config.keep_runs
        self._tidying = asyncio.create_task(self.housekeeper.keep_tidy(*limits), name="delete old runs")

    async def stop(self) -> None:
        """Stop driving. Agents receive no end of their run: it goes on at the next start."""
        self.stopping = True
        for waiting in (self._pulse, self._ending, self._tidying, self._keeping):
            if waiting is not None:
                waiting.cancel()
        for task in self.drives.values():
            task.cancel()
        await asyncio.gather(*self.drives.values(), return_exceptions=True)
        self.sessions.end_all()
        for run in self.runs.values():
            await run.stop()
            run.change.notify()
        self.fleet.note_seen()
        await self.fleet.flush()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)

    async def _beat(self) -> None:
        """So that the sessions notice when this process did not run."""
        while True:
            self.sessions.pulse()
            self.sessions.end_silent()
            self.fleet.look_for_silence()
            await asyncio.sleep(self.config.silent_seconds / 6)

    async def _end_again(self, runs: list[str]) -> None:
        """An aggregator that was away when a run ended does not know it, and would go on to take updates."""
        for run in runs:
            try:
                await self.shards.end(run)
            except StoppedWaiting:
                return log.warning("an aggregator is away: it is told at the next start which runs are over")
            except ServiceError as error:
                log.info("run '%s' is not ended again: %s", run, error, extra={"run": run})
        return None

    def _warn_of_lost_runs(self) -> None:
        """An empty database is normal at the first start, but not beside the folders of runs."""
        folder = self.config.runs_dir
        found = sorted(path.parent.name for path in folder.glob("*/rounds.jsonl")) if folder else []
        if found:
            log.error(
                "the database %s holds no run, but %s has the folders of %d (%s ...): if it was lost, stop now"
                " and put a backup in its place; otherwise these runs cannot go on, only be read",
                make_url(self.config.database_url).render_as_string(),
                folder,
                len(found),
                ", ".join(found[:3]),
            )

    async def create(self, name: str, config_json: str, spec: ModelSpec) -> ShownRun:
        """A new run, or the run of this name if it is the same; that one may have ended."""
        code = await asyncio.to_thread(code_of, self.store, f"new {name}", config_json)
        with plugins.only(self.config.code, code), closing(code) if code else nullcontext():
            config = checked(name, config_json, spec)
        row = RunRow(
            name=name,
            config_json=json.dumps(config.table()),
            spec_json=spec_to_json(spec),
            num_shards=len(self.shards.addresses),
            phase=WAITING,
            created_at=self.clock(),
        )
        known = await asyncio.to_thread(self.store.run, name)
        if known is None:
            await self._check_models(name)
            if run := await self._enter(row, config.priority):
                return LiveRun(run)
            known = await asyncio.to_thread(self.store.run, name)
        assert known is not None
        same_model = spec_from_json(known.spec_json) == spec
        if not same_model or RunConfig.parse(parse_json(known.config_json)) != config:
            what = "configuration" if same_model else "model"
            raise NameTaken(
                f"run '{name}' exists with another {what}: choose another name, or repeat the same {what}"
            )
        return self._shown(known)

    async def _enter(self, row: RunRow, priority: int) -> CoordinatorRun | None:
        """A new run, at work or in the queue; ``None`` if another took the name just now."""
        async with self._creating:
            place = Place(row.name, QUEUED, priority, row.created_at)
            row = replace(row, phase=self._queue.first_phase(place))
            if not await asyncio.to_thread(self.store.create_run, row):
                return None
            run = await CoordinatorRun.load(row, self._services)
            await self._start_run(run)
        if run.state.phase != QUEUED:
            self._offer(run)
        self._queue.settle()
        return run

    def _phase_changed(self, name: str) -> None:
        run = self.runs.get(name)
        if run is not None and run.state.phase == WAITING:
            self._offer(run)
        self._queue.settle()

    def _offer(self, run: CoordinatorRun) -> None:
        """To all that may join and have not."""
        offer = self.offer(run)
        for client in filter(run.allows, self.sessions.clients):
            if not (client in run.state.members and self.sessions.ready(client, run.name)):
                self.sessions.push_to(client, offer)

    def offer(self, run: CoordinatorRun) -> pb.SessionResponse:
        """What an agent needs to prepare for a run."""
        return self.offer_of(run.name, run.row.config_json, run.spec, repr(run.row.created_at))

    def offer_of(self, name: str, config_json: str, spec: ModelSpec, instance: str) -> pb.SessionResponse:
        addresses = self.config.reachable
        parts = assign(spec, len(addresses)) if len(addresses) > 1 else [[]]
        return pb.SessionResponse(
            run=pb.RunOffer(
                run=name,
                config_json=config_json,
                model_digest=spec.digest,
                shards=[
                    pb.Shard(address=address, tensors=names)
                    for address, names in zip(addresses, parts, strict=True)
                ],
                instance=instance,
            )
        )

    def offers(self, client: str) -> list[pb.SessionResponse]:
        """The runs that the client may join, or in which it has still something to do; none that is queued."""
        runs = [run for run in self.runs.values() if not run.ended and run.state.phase != QUEUED]
        return [self.offer(run) for run in runs if run.allows(client) or client in run.state.working]

    async def settle_agent(self, client: str) -> None:
        """Its labels changed, or it was cordoned: it leaves runs that it is not for, and may join others."""
        for run in [run for run in self.runs.values() if not run.ended and run.state.phase != QUEUED]:
            await run.settle_member(client)
            if run.allows(client) and run.name not in self.sessions.joined(client):
                self.sessions.push_to(client, self.offer(run))

    async def shown_runs(self) -> list[ShownRun]:
        """All runs, newest first, each with what a list shows of it."""
        return [self._shown(row) for row in await asyncio.to_thread(self.store.runs, brief=True)]

    async def find(self, name: str) -> ShownRun | None:
        """The run of this name; without a name the newest that is not over, or else the newest."""
        if not name:
            shown = await self.shown_runs()
            name = next((run.name for run in (*(r for r in shown if not r.ended), *shown)), "")
        if name in self.runs:
            return LiveRun(self.runs[name])
        row = await asyncio.to_thread(self.store.run, name)
        return self._shown(row) if row else None

    async def result(self, name: str) -> str:
        """The result of a run that is over, as JSON."""
        run = self.runs.get(name) or await self._load(name)
        return (await asyncio.to_thread(run.keeper.result)).to_json()

    def _shown(self, row: RunRow) -> ShownRun:
        run = self.runs.get(row.name)
        return LiveRun(run) if run else EndedRun(row, self.store)

    async def _start_run(self, run: CoordinatorRun) -> None:
        table = run.config.table()
        await run.keeper.write(lambda directory: directory.start(table, each_record(self.store, run.name)))
        self.runs[run.name] = run
        self.drives[run.name] = asyncio.create_task(run.drive(), name=f"run {run.name}")

    async def _load(self, name: str) -> CoordinatorRun:
        row = await asyncio.to_thread(self.store.run, name)
        if row is None:
            raise NoSuchRun(f"no run '{name}' here; `fedel runs` lists them")
        return await CoordinatorRun.load(row, self._services)

    async def _repair_result(self, name: str) -> None:
        """The process may have died between the end of the run and its last file."""
        directory = self._services.directory(name)
        if directory is not None and directory.path.exists() and not directory.finished:
            run = await self._load(name)
            await run.keeper.write_result()

    async def _check_models(self, run: str) -> None:
        for shard, address in enumerate(self.shards.addresses):
            try:
                version = await self.shards.newest_version(run, shard)
            except aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    raise ModelMissing(
                        f"aggregator {address} has no model of run '{run}': send it there first (CreateModel)"
                    ) from None
                raise
            if version != 0:
                raise NameTaken(
                    f"aggregator {address} holds version {version} of an earlier '{run}': choose another name"
                )


def checked(name: str, config_json: str, spec: ModelSpec) -> RunConfig:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"run name {name!r}: use letters, digits, dots, dashes and underscores, at most 100")
    try:
        table = parse_json(config_json)
    except ValueError as error:
        raise ConfigError(f"run '{name}': its configuration is not valid JSON: {error}") from None
    config = on_devices(RunConfig.parse(table, f"run '{name}'"))
    rounds = config.rounds
    if 0 < rounds.num_participants < rounds.min_reports:
        raise ConfigError(
            f"run '{name}': min_reports = {rounds.min_reports} is above num_participants ="
            f" {rounds.num_participants}: no round would ever close"
        )
    if not spec.weights:
        raise ConfigError(f"run '{name}': its model has no trainable tensor")
    try:
        RoundPlanner(config, spec)
        check_deployable(config)
    except FedelError as error:
        raise ConfigError(f"run '{name}': {error}") from None
    return config
