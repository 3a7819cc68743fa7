"""Large fleets: no status, record or list of runs is too large for a message."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from fedel_coordinator.store import RoundRow

from fedel.desk.submit import follow, list_runs, look
from fedel.records import ClientRecord, RoundRecord
from fedel.roles.run_state import CLOSED, Member
from fedel.v1 import coordinator_pb2 as pb
from fedel.wire.watch import in_parts, whole
from tests.roles.world import PROFILES
from tests.services.coordinator.support import RUN, Federation, asynchronous, run_config

TENSORS = tuple(f"layer{i // 40}.{i}.convolution.weight" for i in range(161))
ENTRY = ClientRecord("c", None, 0, 161, TENSORS, 4, 10, 0.5, 1.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.0, False, 0)
RECORD = RoundRecord(
    round=0,
    strategy="fedavg",
    budget_seconds=0.1,
    num_tasks=1000,
    num_updates=1000,
    loss=0.5,
    o1=0.0,
    clients=tuple(replace(ENTRY, client=f"client-{i:04}") for i in range(1000)),
)


async def with_records(federation: Federation, count: int) -> None:
    """A run whose first rounds were those of a thousand clients."""
    await federation.create(run_config(min_clients=99))
    store = federation.coordinator.store
    for number in range(count):
        text = replace(RECORD, round=number).to_json()
        await asyncio.to_thread(store.put_round, RoundRow(RUN, number, CLOSED, "{}", 0.0, text, 0.0))


@asynchronous
async def test_the_records_of_a_thousand_clients_are_followed(tmp_path: Path) -> None:
    assert len(RECORD.to_json()) > 4 * 1024 * 1024
    async with Federation(tmp_path) as federation:
        await with_records(federation, 2)
        records: list[str] = []

        def show(status: pb.RunStatus) -> None:
            records.extend(status.rounds_json)

        watching = asyncio.create_task(follow(federation.address, RUN, show))
        await federation.status(lambda s: s.rounds_json and RoundRecord.from_json(s.rounds_json[-1]).round == 1)
        await federation.control(pb.RUN_ACTION_STOP_NOW)
        await watching
        assert [replace(RECORD, round=0), replace(RECORD, round=1)] == [
            RoundRecord.from_json(text) for text in records
        ]


@asynchronous
async def test_ten_thousand_clients_are_shown(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(min_clients=20_000))
        run = federation.coordinator.runs[RUN]
        names = [f"a-client-with-a-rather-long-name-{i:05}" for i in range(10_000)]
        profile = next(iter(PROFILES.values()))
        members = {name: Member(name, 10, profile, "jetson-orin-nano") for name in names}
        async with run._lock:  # an event that is under way would put its own state in place of this one
            run.state = replace(run.state, members=members)
        status = await look(federation.address, RUN)
        assert names == [client.client for client in status.clients]
        (listed,) = await list_runs(federation.address)
        assert (10_000, 0, 0) == (listed.num_clients, listed.num_connected, len(listed.clients))


@asynchronous
async def test_many_runs_come_in_pages(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config())
        store = federation.coordinator.store
        row = store.run(RUN)
        for number in range(700):
            name, created = f"old-{number:03}", float(number)
            large = row.config_json[:-1] + ', "note": "' + "x" * 5000 + '"}'
            old = replace(row, name=name, created_at=created, phase="stopped", config_json=large)
            await asyncio.to_thread(store.create_run, old)
        runs = await list_runs(federation.address)
        assert [RUN, *(f"old-{i:03}" for i in reversed(range(700)))] == [status.run for status in runs]


@asynchronous
async def test_a_status_is_put_together_again() -> None:
    clients = [pb.ClientStatus(client=f"c{i}") for i in range(2500)]
    for rounds in ([], ["{}", "{}"], ["x" * 3_000_000]):
        parts = list(in_parts(pb.RunStatus(run="r", round_num=3), clients, rounds))

        async def answers(parts: list[pb.WatchRunResponse] = parts):
            for part in [*parts, *parts]:
                yield part

        for status in [status async for status in whole(answers())]:
            assert (clients, rounds) == (list(status.clients), list(status.rounds_json))
            assert ("r", 3) == (status.run, status.round_num)
        assert all(part.ByteSize() < 1_000_000 for part in parts)
