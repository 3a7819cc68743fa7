"""One suite for the store, run on SQLite in a file and in memory, and on a real PostgreSQL."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from fedel_coordinator.migrations import STEPS, migrate
from fedel_coordinator.persistence import spec_from_json
from fedel_coordinator.sql import SqlStore, metadata
from fedel_coordinator.store import (
    AgentRow,
    ClientRow,
    CodeRow,
    ReportRow,
    RoundRow,
    RunRow,
    Store,
    StoreUnavailable,
)

from fedel.chaos.postgres import fresh_database
from fedel.errors import ConfigError, ServiceError
from fedel.roles.run_state import CLOSED, COMMITTED, OPEN, SEALED

RUN = RunRow("a", '{"x": "ä"}', "{}", 2, "waiting", 10.5)
CLIENT = ClientRow("a", "jetson-1", "orin", 2**40, "0.1", 2**33, True, "{}")
ROUND = RoundRow("a", 0, OPEN, '{"tasks": []}', 11.0)
REPORT = ReportRow("a", 0, "jetson-1", "{}", '{"train": 1.5}', "{}", 2**35, 5)


@pytest.fixture(params=["file", "memory", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return fresh_database(request.getfixturevalue("postgres_server"))
    return "sqlite://" if request.param == "memory" else f"sqlite:///{tmp_path}/store.db"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    store = SqlStore(url)
    yield store
    store.close()


def test_a_run_is_created_once(store: Store) -> None:
    assert store.create_run(RUN)
    assert not store.create_run(replace(RUN, config_json="{}"))
    assert RUN == store.run("a")
    assert store.run("b") is None


def test_runs_are_listed_newest_first(store: Store) -> None:
    rows = [replace(RUN, name=name, created_at=at) for name, at in (("b", 2.0), ("c", 9.0), ("a", 5.0))]
    for row in rows:
        store.create_run(row)
    assert ["c", "a", "b"] == [row.name for row in store.runs()]


def test_code_is_kept_by_its_hash(store: Store) -> None:
    rows = [CodeRow(name, bytes(range(256)) * 40_000, at) for name, at in (("a", 1.0), ("b", 2.0), ("c", 9.0))]
    for row in rows:
        store.put_code(row)
    store.put_code(replace(rows[0], content=b"other"))
    assert (b"other", rows[1]) == (store.code("a").content, store.code("b"))  # type: ignore[union-attr]
    store.drop_codes({"b"}, before=5.0)
    assert [None, rows[1], rows[2]] == [store.code(name) for name in "abc"]


def test_a_phase_changes_nothing_else(store: Store) -> None:
    store.create_run(RUN)
    store.set_phase("a", "failed", "disk full", 99.0)
    assert replace(RUN, phase="failed", message="disk full", ended_at=99.0) == store.run("a")


def test_a_client_that_joins_again_replaces_itself(store: Store) -> None:
    store.create_run(RUN)
    store.put_client(CLIENT)
    store.put_client(replace(CLIENT, client="Zeta"))
    store.put_client(replace(CLIENT, num_samples=7))
    assert [replace(CLIENT, client="Zeta"), replace(CLIENT, num_samples=7)] == store.clients("a")


def test_a_client_that_left_is_known_until_it_joins_again(store: Store) -> None:
    store.create_run(RUN)
    store.put_client(CLIENT)
    store.set_left("a", "jetson-1")
    assert [replace(CLIENT, has_left=True)] == store.clients("a")
    store.put_client(CLIENT)
    assert [CLIENT] == store.clients("a")


def test_a_round_goes_from_open_to_closed(store: Store) -> None:
    store.create_run(RUN)
    store.put_round(ROUND)
    assert ROUND == store.last_round("a")
    store.seal_round("a", 0, 12.0)
    sealed = replace(ROUND, status=SEALED, sealed_at=12.0)
    assert sealed == store.round("a", 0)
    store.commit_round("a", 0, '{"round": 0}', '{"round_num": 1}', 1)
    assert replace(sealed, status=COMMITTED, record_json='{"round": 0}') == store.round("a", 0)
    assert replace(RUN, state_json='{"round_num": 1}', model_version=1) == store.run("a")
    assert [] == store.records("a")
    store.close_round("a", 0, '{"round": 0, "accuracy": 0.5}', (1, 0.5))
    closed = store.round("a", 0)
    assert closed is not None
    assert CLOSED == closed.status
    run = store.run("a")
    assert run is not None
    assert (1, 0.5) == (run.best_version, run.best_accuracy)


def test_a_round_that_is_not_better_does_not_change_the_best(store: Store) -> None:
    store.create_run(replace(RUN, best_version=4, best_accuracy=0.75))
    store.put_round(ROUND)
    store.close_round("a", 0, "{}", None)
    run = store.run("a")
    assert run is not None
    assert (4, 0.75) == (run.best_version, run.best_accuracy)


def test_an_open_round_can_be_planned_again(store: Store) -> None:
    store.create_run(RUN)
    store.put_round(ROUND)
    store.put_round(replace(ROUND, plan_json='{"tasks": [1]}'))
    assert replace(ROUND, plan_json='{"tasks": [1]}') == store.last_round("a")


def test_records_come_in_order_from_a_given_round(store: Store) -> None:
    store.create_run(RUN)
    for number in (1, 0, 2, 3):
        store.put_round(replace(ROUND, round_num=number))
    for number in (2, 0, 1):
        store.close_round("a", number, str(number), None)
    assert ["0", "1", "2"] == store.records("a")
    assert ["1"] == store.records("a", 1, 1)


def test_one_report_is_kept_per_client_and_round(store: Store) -> None:
    store.create_run(RUN)
    store.put_report(REPORT)
    store.put_report(replace(REPORT, client="a-1"))
    store.put_report(replace(REPORT, bytes_up=9))
    store.put_report(replace(REPORT, round_num=1))
    assert [replace(REPORT, client="a-1"), replace(REPORT, bytes_up=9)] == store.reports("a", 0)


def test_agents_are_written_together_and_replaced_one_by_one(store: Store) -> None:
    rows = [AgentRow(f"jetson-{n}", labels_json='{"site": "ä"}', memory_bytes=2**40) for n in range(1500)]
    store.put_agents(rows)
    changed = replace(rows[7], cordoned=True, error_trace="a\nb", up_rate=1.5)
    store.put_agents([changed])
    found = {row.name: row for row in store.agents()}
    assert {row.name: row for row in rows} | {changed.name: changed} == found
    store.delete_agents([row.name for row in rows if row != rows[3]])
    assert [rows[3]] == store.agents()


def test_rows_of_an_unknown_run_are_refused(store: Store) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        store.put_client(CLIENT)


def test_many_threads_may_write_at_once(store: Store) -> None:
    store.create_run(RUN)
    names = [f"client-{i:02d}" for i in range(16)]

    def put(name: str) -> None:
        for samples in range(5):
            store.put_client(replace(CLIENT, client=name, num_samples=samples))

    threads = [threading.Thread(target=put, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(name, 4) for name in names] == [(row.client, row.num_samples) for row in store.clients("a")]


@pytest.mark.parametrize("url", ["file", "postgres"], indirect=True)
def test_everything_is_there_after_a_restart(url: str) -> None:
    first = SqlStore(url)
    first.create_run(RUN)
    first.put_client(CLIENT)
    first.close()
    second = SqlStore(url)
    assert ([RUN], [CLIENT]) == (second.runs(), second.clients("a"))
    second.close()


def test_the_migrated_schema_has_the_columns_that_queries_use(url: str) -> None:
    engine = SqlStore(url)._engine
    found = sa.inspect(engine)
    for table in metadata.sorted_tables:
        assert {c.name for c in table.columns} == {c["name"] for c in found.get_columns(table.name)}
    engine.dispose()


@pytest.mark.parametrize("url", ["file", "postgres"], indirect=True)
def test_a_newer_schema_is_refused(url: str) -> None:
    SqlStore(url).close()
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE schema_version SET version = 99"))
    engine.dispose()
    with pytest.raises(ServiceError, match=rf"version 99, this coordinator knows {len(STEPS)}.*database_url"):
        SqlStore(url)


@pytest.mark.parametrize("url", ["file", "postgres"], indirect=True)
def test_a_later_step_is_applied_to_an_older_database_once(url: str) -> None:
    store = SqlStore(url)
    store.create_run(RUN)
    steps = (*STEPS, ("ALTER TABLE runs ADD COLUMN owner TEXT",))
    for _ in range(2):
        with store._engine.begin() as connection:
            migrate(connection, steps)
    assert "owner" in {c["name"] for c in sa.inspect(store._engine).get_columns("runs")}
    store.close()


@pytest.mark.parametrize("url", ["file", "postgres"], indirect=True)
def test_rows_of_the_first_schema_are_kept(url: str) -> None:
    engine = sa.create_engine(url)
    run, row = asdict(RUN), asdict(CLIENT) | {"last_seen": 3.25}
    del row["num_held_out"], run["input_json"]  # came later
    with engine.begin() as connection:
        migrate(connection, STEPS[:1])
        connection.execute(sa.insert(metadata.tables["runs"]).values(run))
        clients = sa.table("clients", *map(sa.column, row))
        connection.execute(sa.insert(clients).values(row))
    engine.dispose()
    store = SqlStore(url)
    assert ([RUN], [CLIENT]) == (store.runs(), store.clients("a"))
    store.close()


@pytest.mark.parametrize("url", ["file", "postgres"], indirect=True)
def test_a_step_that_fails_leaves_the_schema_as_it_was(url: str) -> None:
    store = SqlStore(url)
    with pytest.raises(sa.exc.DatabaseError), store._engine.begin() as connection:
        migrate(connection, (*STEPS, ("ALTER TABLE runs ADD COLUMN owner TEXT", "NONSENSE")))
    assert "owner" not in {c["name"] for c in sa.inspect(store._engine).get_columns("runs")}
    store.close()


def test_a_database_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"nowhere/store\.db.*check that it is there"):
        SqlStore(f"sqlite:///{tmp_path}/nowhere/store.db")


@pytest.mark.parametrize("url", ["mysql://x/y", "no url at all", "oracle+x://a"])
def test_a_database_we_do_not_know_is_named(url: str) -> None:
    with pytest.raises(ServiceError, match="write sqlite:///file or postgresql"):
        SqlStore(url)


def test_a_password_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        SqlStore(f"postgresql+psycopg://me:secret@/x?host={tmp_path}")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("content", [b"not a database at all" * 500, None], ids=["foreign", "overwritten"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "coordinator.db"
    store = SqlStore(f"sqlite:///{file}")
    store.create_run(RUN)
    store.close()
    sound = file.read_bytes()
    file.write_bytes(content or sound[:4096] + b"\xff" * (len(sound) - 4096))
    with pytest.raises(ServiceError, match="is damaged") as caught:
        SqlStore(f"sqlite:///{file}").runs()
    assert str(file) in str(caught.value)
    assert "backup" in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE runs SET num_shards = 'many'",
        "UPDATE runs SET name = x'ff'",
        "UPDATE schema_version SET version = 'x'",
    ],
)
def test_values_of_another_type_are_named(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "coordinator.db"
    store = SqlStore(f"sqlite:///{file}")
    store.create_run(RUN)
    store.close()
    with sqlite3.connect(file) as connection:
        connection.execute(damage)
    with pytest.raises(ServiceError, match="is damaged") as caught:
        SqlStore(f"sqlite:///{file}").runs()
    assert str(file) in str(caught.value)
    assert "backup" in str(caught.value)


@pytest.mark.parametrize("text", ["{", '{"tensors": 1}', "[" * 100_000])
def test_a_model_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="model of a run"):
        spec_from_json(text)
