"""What the coordinator does for many clients and many rounds: counted, not timed."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from fedel_coordinator.change_signal import rest_seconds
from fedel_coordinator.persistence import spec_to_json
from fedel_coordinator.run import CoordinatorRun
from fedel_coordinator.run_view import EndedRun
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import BATCH_ROUNDS, ClientRow, RoundRow, RunRow, each_record
from fedel_coordinator.web.rounds import Rounds

from fedel import testing
from fedel.records import RoundRecord
from fedel.roles import events as ev
from fedel.roles.run_state import Member
from fedel.testing import profile
from tests.services.coordinator.support import RUN, Federation, asynchronous, run_config

NUM_CLIENTS = 50
JOINS = [ev.Joined(Member(f"many-{number}", 10, profile())) for number in range(NUM_CLIENTS)]


async def waiting_run(federation: Federation) -> CoordinatorRun:
    """A run that waits for more clients than will come."""
    await federation.create(run_config(min_clients=10 * NUM_CLIENTS))
    return federation.coordinator.runs[RUN]


@asynchronous
async def test_what_many_clients_say_at_once_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions, together = [], SqlStore.together

    @contextmanager
    def counted(store: SqlStore) -> Any:
        transactions.append(store)
        with together(store):
            yield

    async with Federation(tmp_path) as federation:
        run = await waiting_run(federation)
        monkeypatch.setattr(SqlStore, "together", counted)
        await asyncio.gather(*map(run.apply, JOINS))
        assert len(transactions) <= 2  # the first, and those that came while it was written
        assert NUM_CLIENTS == len(run.state.members) == len(federation.coordinator.store.clients(RUN))


@asynchronous
async def test_a_client_whose_row_cannot_be_written_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_client = SqlStore.put_client

    def refuse(store: SqlStore, row: ClientRow) -> None:
        if row.client == "many-7":
            raise ValueError("planted")
        put_client(store, row)

    async with Federation(tmp_path) as federation:
        run = await waiting_run(federation)
        monkeypatch.setattr(SqlStore, "put_client", refuse)
        outcomes = await asyncio.gather(*map(run.apply, JOINS), return_exceptions=True)
        assert [7] == [number for number, outcome in enumerate(outcomes) if outcome is not None]
        kept = {row.client for row in federation.coordinator.store.clients(RUN)}
        assert kept == run.state.members.keys() == {event.member.client for event in JOINS} - {"many-7"}


@asynchronous
async def test_a_late_round_writes_as_much_as_an_early_one(tmp_path: Path) -> None:
    written: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")) and " agents " not in statement:
            written.append(statement)

    async with Federation(tmp_path) as federation:
        store = federation.coordinator.store
        sa.event.listen(store._engine, "before_cursor_execute", note)
        totals = []
        federation.start_agents(3)
        for number, num_rounds in enumerate((2, 5, 8)):
            written.clear()
            run = f"run-{number}"
            await federation.create(run_config(num_rounds=num_rounds, evaluate_every=0), run)
            await federation.finished(run)
            totals.append(len(written))
            for round_num in range(num_rounds):
                assert [] == store.reports(run, round_num)  # they are in the records
        assert totals[1] - totals[0] == totals[2] - totals[1]


@asynchronous
async def test_messages_do_not_make_the_run_look_for_silence_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    async with Federation(tmp_path) as federation:
        run = await waiting_run(federation)
        await asyncio.gather(*map(run.apply, JOINS))
        monkeypatch.setattr(run.services.sessions, "present", lambda client: not looks.append(client))
        run.wake(heard_again=True)
        await run._report_silence()
        assert NUM_CLIENTS == len(looks)
        await run.apply(ev.Disconnected("many-1"))
        await run._report_silence()
        assert NUM_CLIENTS == len(looks)


def test_a_follower_of_many_clients_rests_longer() -> None:
    assert 0.1 == rest_seconds(0.1, 0.001)
    assert 9.5 == rest_seconds(0.1, 0.5)


def test_records_of_a_long_run_are_never_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore("sqlite://")
    store.create_run(RunRow(RUN, "{}", "{}", 1, "running", 0.0))
    for number in range(3 * BATCH_ROUNDS + 1):
        store.put_round(RoundRow(RUN, number, "open", "{}", 0.0))
        store.close_round(RUN, number, str(number), None)
    read, records = [], store.records
    monkeypatch.setattr(store, "records", lambda *about: read.append(len(found := records(*about))) or found)
    assert [str(number) for number in range(3 * BATCH_ROUNDS + 1)] == list(each_record(store, RUN))
    assert [BATCH_ROUNDS, BATCH_ROUNDS, BATCH_ROUNDS, 1, 0] == read


@asynchronous
async def test_the_newest_rounds_are_shown_without_a_look_at_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, num_rounds = SqlStore("sqlite://"), 10 * BATCH_ROUNDS
    config, spec = json.dumps(run_config().table()), spec_to_json(testing.spec())
    store.create_run(RunRow(RUN, config, spec, 1, "finished", 0.0, model_version=num_rounds))
    for number in range(num_rounds):
        record = RoundRecord(number, "fedel", 0.1, 1, 1, 1.0, 0.0, ())
        store.put_round(RoundRow(RUN, number, "closed", "{}", 0.0, record.to_json()))
    asked, records = [], store.records
    monkeypatch.setattr(store, "records", lambda *about: asked.append(about[1:]) or records(*about))
    row = store.run(RUN)
    assert row is not None
    rounds, run = Rounds(store), EndedRun(row, store)
    for _ in range(2):
        found = await rounds.brief(run, num_rounds - 3)
        assert [num_rounds - 3, num_rounds - 2, num_rounds - 1] == [brief["round"] for brief in found]
    assert [(num_rounds - 3, 3)] == asked
    assert list(range(num_rounds)) == [brief["round"] for brief in await rounds.brief(run, 0, num_rounds)]
