"""The registry of agents: a row for each that ever had a session; kept in memory, written in batches."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fedel.errors import ConfigError
from fedel.roles.gate import MAX_NAME, MAX_TRACE, clean, clean_lines
from fedel.roles.run_state import TaskResult
from fedel.roles.speed import learned
from fedel.selectors import Selector, objection_to_labels
from fedel.serialisation import from_json
from fedel.types import Speed
from fedel_coordinator.errors import FleetFull, NoSuchAgent, NotNow
from fedel_coordinator.sessions import Device, Sessions
from fedel_coordinator.store import AgentRow, Store, StoreUnavailable

log = logging.getLogger(__name__)
FLUSH_SECONDS = 5.0
"""What agents say is written together this often; what an operator says is written at once."""
BATCH_ROWS = 500
"""In one transaction, so that what runs write does not wait for long."""
SEEN_SECONDS = 300.0
"""How often it is written that agents are still here. A heartbeat writes nothing."""


class Fleet:
    """Owned by the event loop; only ``_write`` waits."""

    def __init__(
        self, store: Store, sessions: Sessions, clock: Callable[[], float], max_agents: int = 20_000
    ) -> None:
        self._store, self._sessions, self._clock, self._max_agents = store, sessions, clock, max_agents
        self._rows: dict[str, AgentRow] = {}
        self._changed: set[str] = set()
        self._gone: set[str] = set()
        """Rows to be deleted."""
        self._writing = asyncio.Lock()
        self._awaited: set[str] = set()
        """Agents whose silence would be news: they had a session here, and did not say goodbye."""
        self._silent: set[str] = set()
        """Those that have been silent since."""
        self._store_is_away = False

    async def load(self) -> None:
        self._rows = {row.name: row for row in await asyncio.to_thread(self._store.agents)}

    def names(self, after: str = "") -> list[str]:
        """In order; only those that come after a name."""
        return sorted(name for name in self._rows if name > after)

    def row(self, name: str) -> AgentRow:
        found = self._rows.get(name)
        if found is None:
            raise NoSuchAgent(
                f"no agent '{clean(name, MAX_NAME)}' has had a session here; `fedel fleet` lists them"
            )
        return found

    def last_seen(self, name: str) -> float:
        if self._sessions.is_open(name):
            return self._clock() - self._sessions.silent_for(name)
        return self._rows[name].last_seen

    def allows(self, client: str, selector: Selector) -> bool:
        """Whether the client may get tasks of a run with this selector from its next round on."""
        row = self._rows.get(client)
        if row is None:
            return not selector.terms
        return not row.cordoned and selector.matches(client, row.device_type, labels_of(row))

    # What agents do

    def opened(
        self,
        client: str,
        device: Device,
        labels: Mapping[str, str],
        protocol: int,
        certificate_end: float = 0.0,
    ) -> None:
        """A session begins. Names, sizes and labels have passed the gate."""
        if client not in self._rows and len(self._rows) >= self._max_agents:
            self._make_room()
        self._put(
            replace(
                self._rows.get(client, AgentRow(client)),
                device_type=device.device_type,
                memory_bytes=device.memory_bytes,
                agent_version=device.agent_version,
                protocol=protocol,
                labels_json=_to_json(labels),
                certificate_end=certificate_end,
                last_seen=self._clock(),
            )
        )
        self._awaited.add(client)

    def closed(self, client: str, said_goodbye: bool) -> None:
        if client in self._rows:
            self._put(replace(self._rows[client], last_seen=self.last_seen(client)))
        if said_goodbye:
            self._awaited.discard(client)
            self._silent.discard(client)

    def failed(self, client: str, run: str, round_num: int, message: str, trace: str = "") -> bool:
        """Keep the agent's last error; returns whether it is another one than before."""
        row = self._rows.get(client)
        if row is None:
            return False
        told, about = clean(message), (clean(run, MAX_NAME), max(-1, round_num))
        self._put(
            replace(
                row,
                error_at=self._clock(),
                error_run=about[0],
                error_round=about[1],
                error_message=told,
                error_trace=clean_lines(trace, MAX_TRACE),
            )
        )
        return (row.error_message, row.error_run) != (told, about[0])

    def measured(self, client: str, result: TaskResult) -> None:
        """What a task that counted says about the agent's link."""
        row = self._rows.get(client)
        if row is not None:
            speed = learned(Speed(down_rate=row.down_rate, up_rate=row.up_rate), result)
            self._put(replace(row, down_rate=speed.down_rate, up_rate=speed.up_rate))

    def look_for_silence(self) -> None:
        """One line in the log when an agent falls silent, and one when it is heard again."""
        for client in [name for name in self._awaited if self._is_silent(name)]:
            self._awaited.discard(client)
            self._silent.add(client)
            seconds = self._clock() - self.last_seen(client)
            text = "agent '%s' is silent: it was last heard %.0f s ago; does it run, and is its network there?"
            log.warning(text, client, seconds, extra={"client": client})
        for client in [name for name in self._silent if not self._is_silent(name)]:
            self._silent.discard(client)
            self._awaited.add(client)
            log.info("agent '%s' is heard again", client, extra={"client": client})

    def _is_silent(self, client: str) -> bool:
        if client not in self._rows:
            return False
        if self._sessions.is_open(client):
            return not self._sessions.present(client)
        return self._clock() - self._rows[client].last_seen > self._sessions.silent_seconds

    def _make_room(self) -> None:
        """Forget the agent that was away longest, of those about which no operator has said anything."""
        may_go = [
            row
            for row in self._rows.values()
            if not (row.cordoned or row.operator_labels_json != "{}" or self._sessions.is_open(row.name))
        ]
        if not may_go:
            raise FleetFull(
                f"the coordinator knows {len(self._rows)} agents, and remembers no more (max_agents):"
                " `fedel fleet forget NAME` removes one that is gone"
            )
        self._drop(min(may_go, key=lambda row: row.last_seen).name)

    # What operators do

    async def label(self, name: str, labels: Mapping[str, str], dropped: Collection[str] = ()) -> None:
        row = self.row(name)
        before: dict[str, str] = from_json(dict[str, str], row.operator_labels_json, "labels")
        after = {key: value for key, value in {**before, **labels}.items() if key not in dropped}
        if wrong := objection_to_labels(after):
            raise ConfigError(f"agent '{name}': {wrong}")
        if unknown := sorted(set(dropped) - before.keys()):
            raise ConfigError(
                f"agent '{name}' has no label '{clean(unknown[0], MAX_NAME)}' of an operator; those of the"
                " device are in its agent.toml"
            )
        await self._set(name, operator_labels_json=_to_json(after))

    async def cordon(self, name: str, cordoned: bool) -> None:
        self.row(name)
        await self._set(name, cordoned=cordoned)

    async def forget(self, name: str) -> None:
        self.row(name)
        if self._sessions.is_open(name):
            raise NotNow(f"agent '{name}' is connected: stop it, or revoke its certificate, first")
        self._drop(name)
        await self._write(())

    # The database

    async def keep(self) -> None:
        """Write what changed, again and again, until this is cancelled."""
        seen_at = self._clock()
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self._clock() - seen_at > SEEN_SECONDS:
                seen_at = self._clock()
                self.note_seen()
            await self.flush()

    def note_seen(self) -> None:
        """When the agents that are here were last heard."""
        for name in self._rows:
            if self._sessions.is_open(name):
                self._put(replace(self._rows[name], last_seen=self.last_seen(name)))

    async def flush(self) -> None:
        """Write what changed; tried again later if the database does not answer."""
        try:
            await self._write(self._changed)
            self._store_is_away = False
        except StoreUnavailable as error:
            if not self._store_is_away:
                log.warning("what is known of agents is not written yet: %s", error)
            self._store_is_away = True

    async def _set(self, name: str, **changes: Any) -> None:
        """A wish of an operator: kept, or refused. If the database does not answer, nothing changes."""
        before = self._rows[name]
        self._put(replace(before, **changes))
        try:
            await self._write({name})
        except StoreUnavailable:
            was = {key: getattr(before, key) for key in changes}
            self._put(replace(self._rows[name], **was))
            raise

    async def _write(self, names: Collection[str]) -> None:
        async with self._writing:
            rows, gone = [self._rows[name] for name in names if name in self._rows], list(self._gone)
            self._changed -= {row.name for row in rows}
            self._gone -= set(gone)
            try:
                for first in range(0, len(rows), BATCH_ROWS):
                    await asyncio.to_thread(self._store.put_agents, rows[first : first + BATCH_ROWS])
                if gone:
                    await asyncio.to_thread(self._store.delete_agents, gone)
            except BaseException:
                self._changed |= {row.name for row in rows if row.name in self._rows}
                self._gone |= set(gone) - self._rows.keys()
                raise

    def _put(self, row: AgentRow) -> None:
        if self._rows.get(row.name) != row:
            self._rows[row.name] = row
            self._changed.add(row.name)
            self._gone.discard(row.name)

    def _drop(self, name: str) -> None:
        del self._rows[name]
        self._gone.add(name)
        for kept in (self._changed, self._awaited, self._silent):
            kept.discard(name)


def labels_of(row: AgentRow) -> Mapping[str, str]:
    """All labels; of two with one key, the operator's."""
    return _merged(row.labels_json, row.operator_labels_json)


@lru_cache(maxsize=20_000)
def _merged(own: str, operator: str) -> Mapping[str, str]:
    return {**from_json(dict[str, str], own, "labels"), **from_json(dict[str, str], operator, "labels")}


def _to_json(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(labels.items())))
