"""A federation on the loopback in which everything can be disturbed: processes, links, disks, database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedel.audit.audit import Sources
from fedel.chaos.disk import small_disk
from fedel.chaos.postgres import Postgres, binaries, fresh_database, postgres
from fedel.chaos.processes import Process
from fedel.chaos.proxy import Proxy
from fedel.desk.submit import follow
from fedel.errors import ConfigError
from fedel.v1 import coordinator_pb2 as pb

RUN = "drill"
COORDINATOR = "coordinator"
DATABASE = "database"
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Layout:
    """What a federation consists of."""

    num_agents: int = 3
    num_aggregators: int = 1
    database: str = "sqlite"
    """``sqlite`` or ``postgresql``."""
    heartbeat_seconds: float = 1.0
    keep_updates: int = -1
    small_disks: bool = True
    """Servers get disks that can be full, where that is possible."""
    disk_megabytes: int = 96

    @property
    def agents(self) -> list[str]:
        return [f"client-{index}" for index in range(self.num_agents)]

    @property
    def aggregators(self) -> list[str]:
        return [f"aggregator-{index}" for index in range(self.num_aggregators)]

    @property
    def servers(self) -> list[str]:
        return [COORDINATOR, *self.aggregators]


@dataclass
class Federation:
    layout: Layout
    folder: Path
    processes: dict[str, Process] = field(default_factory=dict)
    links: dict[str, Proxy] = field(default_factory=dict)
    """``client-0>coordinator``, ``agents>aggregator-0``, ``coordinator>aggregator-0``."""
    disks: dict[str, Path] = field(default_factory=dict)
    """Of the servers whose disk can be full."""
    database: Postgres | None = None
    database_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the database is being restarted."""
    database_url: str = ""
    address: str = ""
    """Of the coordinator, for the drill itself: this link is never disturbed."""

    def place(self, name: str) -> Path:
        """Where a process keeps what it has."""
        return self.folder / f"{name}-disk"

    def sources(self) -> Sources:
        """For an audit, once the processes have ended."""
        aggregators = tuple(self.place(name) / "data" for name in self.layout.aggregators)
        return Sources(RUN, aggregators, self.database_url, self.folder / "runs" / RUN)

    async def stop(self) -> list[str]:
        """End every process, agents first; returns those that did not end by themselves in time."""
        for link in self.links.values():
            link.mend()
        stuck = []
        for names in (self.layout.agents, self.layout.servers):
            alive = [self.processes[name] for name in names if self.processes[name].returncode is None]
            ended = await asyncio.gather(*(process.stop(STOP_SECONDS) for process in alive))
            stuck += [process.name for process, good in zip(alive, ended, strict=True) if not good]
        return stuck


@contextmanager
def database_for(layout: Layout) -> Iterator[Postgres | None]:
    """A server of PostgreSQL, if the layout asks for it."""
    if layout.database != "postgresql":
        yield None
        return
    programs = binaries()
    if programs is None:
        raise ConfigError("PostgreSQL is not installed here: install it, or use --database sqlite")
    with postgres(programs) as server:
        yield server


@asynccontextmanager
async def federation(
    folder: Path, layout: Layout, database: Postgres | None = None
) -> AsyncIterator[Federation]:
    """``database`` is the server of a layout with PostgreSQL; several federations may use it in turn."""
    made = Federation(layout, folder, database=database)
    async with AsyncExitStack() as stack:
        _prepare_storage(made, stack)

        def start(module: str, name: str, settings: Mapping[str, Any]) -> Process:
            process = made.processes[name] = Process(module, name, folder, settings, own_clock=True)
            stack.callback(process.kill)
            process.start()
            return process

        async def link(name: str, target: str) -> str:
            made.links[name] = await stack.enter_async_context(Proxy(target))
            return made.links[name].address

        inner, public = [], []
        for name in layout.aggregators:
            start("fedel_aggregator", name, _aggregator_settings(made, name))
        for name in layout.aggregators:
            bulk = await made.processes[name].address()
            inner.append(await link(f"{COORDINATOR}>{name}", bulk))
            public.append(await link(f"agents>{name}", bulk))
        coordinator = start("fedel_coordinator", COORDINATOR, _coordinator_settings(made, inner, public))
        made.address = await coordinator.address()
        for index, name in enumerate(layout.agents):
            address = await link(f"{name}>{COORDINATOR}", made.address)
            start("fedel_edge", name, _agent_settings(made, index, address))
        yield made


def _prepare_storage(made: Federation, stack: AsyncExitStack) -> None:
    for name in made.layout.servers:
        place = made.place(name)
        place.mkdir(parents=True)
        if made.layout.small_disks and stack.enter_context(small_disk(place, made.layout.disk_megabytes)):
            made.disks[name] = place
    made.database_url = f"sqlite:///{made.place(COORDINATOR) / 'coordinator.db'}"
    if made.database is not None:
        made.database_url = fresh_database(made.database.url)


def _server_settings(made: Federation, name: str) -> dict[str, Any]:
    return {"listen": "127.0.0.1:0", "port_file": str(made.folder / f"{name}.address")}


def _aggregator_settings(made: Federation, name: str) -> dict[str, Any]:
    return _server_settings(made, name) | {
        "data_dir": str(made.place(name) / "data"),
        "keep_updates": made.layout.keep_updates,
        "idle_seconds": 5.0,
    }


def _coordinator_settings(made: Federation, inner: list[str], public: list[str]) -> dict[str, Any]:
    return _server_settings(made, COORDINATOR) | {
        "aggregators": inner,
        "public_aggregators": public,
        "database_url": made.database_url,
        "runs_dir": str(made.folder / "runs"),
        "heartbeat_seconds": made.layout.heartbeat_seconds,
    }


def _agent_settings(made: Federation, index: int, address: str) -> dict[str, Any]:
    name = made.layout.agents[index]
    return {
        "coordinator": address,
        "name": name,
        "state_dir": str(made.place(name)),
        "evaluate": index == 0,
        "data": {"index": index, "of": made.layout.num_agents},
        "code": {"allow": ["fedel.chaos.trainer"]},
    }


class Watch:
    """Follows the run, also across restarts of its coordinator."""

    def __init__(self, address: str) -> None:
        self.status = pb.RunStatus()
        self._changed = asyncio.Event()
        self._following = asyncio.ensure_future(follow(address, RUN, self._show))
        self._following.add_done_callback(lambda _: self._changed.set())

    def _show(self, status: pb.RunStatus) -> None:
        self.status = status
        self._changed.set()

    @property
    def over(self) -> bool:
        return self._following.done()

    async def reach(self, round_num: int) -> bool:
        """Wait until the run is in that round; false if it ends before."""
        while self.status.round_num < round_num and not self.over:
            self._changed.clear()
            await self._changed.wait()
        return not self.over

    async def ended(self) -> pb.RunStatus:
        return await self._following

    async def close(self) -> None:
        self._following.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._following
