"""The store in SQLite or PostgreSQL: one schema in SQLAlchemy Core serves both."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy import exc
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.pool import StaticPool

from fedel.errors import ServiceError
from fedel.roles.run_state import CLOSED, COMMITTED, SEALED
from fedel_coordinator.migrations import migrate
from fedel_coordinator.store import (
    AgentRow,
    ClientRow,
    CodeRow,
    ReportRow,
    RoundRow,
    RunRow,
    StoreUnavailable,
)

Row = TypeVar("Row", RunRow, ClientRow, RoundRow, ReportRow, AgentRow, CodeRow)
LOCKED_SECONDS = 30
"""How long to wait for another process that writes to the same SQLite file."""

DAMAGED = ("malformed", "not a database")
"""What SQLite says about a file that it cannot read."""

LARGE = ("spec_json", "state_json")
"""Columns of a run that a list of runs does without."""
_TYPES = {"str": sa.Text, "int": sa.BigInteger, "float": sa.Double, "bool": sa.Boolean, "bytes": sa.LargeBinary}
metadata = sa.MetaData()


def _table(name: str, row: type[Any], *keys: str) -> sa.Table:
    """The table whose columns are the fields of a row."""
    hints = {field: str(hint).removesuffix(" | None") for field, hint in row.__annotations__.items()}
    columns: list[sa.Column[Any]] = [
        sa.Column(field, _TYPES[hint], primary_key=field in keys) for field, hint in hints.items()
    ]
    return sa.Table(name, metadata, *columns)


runs = _table("runs", RunRow, "name")
clients = _table("clients", ClientRow, "run", "client")
rounds = _table("rounds", RoundRow, "run", "round_num")
reports = _table("reports", ReportRow, "run", "round_num", "client")
codes = _table("codes", CodeRow, "sha256")
agents = _table("agents", AgentRow, "name")


class SqlStore:
    """The ``Store`` port. ``sqlite://`` without a file lives in memory, for tests."""

    def __init__(self, url: str) -> None:
        try:
            self._engine = new_engine(url)
        except (exc.ArgumentError, exc.NoSuchModuleError, ImportError) as error:
            raise ServiceError(
                f"database_url: {error}; write sqlite:///file or postgresql+psycopg://user@host/name"
            ) from None
        self._insert = sqlite.insert if self._engine.dialect.name == "sqlite" else postgresql.insert
        self._upserts = {table.name: self._upsert(table) for table in (clients, rounds, reports, codes, agents)}
        self._joint = threading.local()
        """Of a thread: the transaction of ``together``."""
        self._reading_engine = self._engine.execution_options(only_reads=True)
        self._write_lock, self._read_lock = _locks(self._engine)
        try:
            with self._writing() as connection:
                migrate(connection)
        except ServiceError:
            self._engine.dispose()
            raise

    def create_run(self, row: RunRow) -> bool:
        with self._writing() as connection:
            statement = self._insert(runs).values(asdict(row)).on_conflict_do_nothing()
            return connection.execute(statement.returning(runs.c.name)).first() is not None

    def run(self, name: str) -> RunRow | None:
        return self._first(RunRow, sa.select(runs).where(runs.c.name == name))

    def runs(self, brief: bool = False) -> list[RunRow]:
        columns = [sa.literal("{}").label(c.name) if brief and c.name in LARGE else c for c in runs.c]
        query = sa.select(*columns).order_by(runs.c.created_at.desc(), runs.c.name.desc())
        return self._all(RunRow, query)

    def delete_run(self, run: str) -> None:
        parts = [sa.delete(table).where(table.c.run == run) for table in (reports, rounds, clients)]
        self._execute(*parts, sa.delete(runs).where(runs.c.name == run))

    def set_phase(self, run: str, phase: str, message: str = "", ended_at: float | None = None) -> None:
        change = sa.update(runs).where(runs.c.name == run)
        self._execute(change.values(phase=phase, message=message, ended_at=ended_at))

    def put_client(self, row: ClientRow) -> None:
        self._put(clients, row)

    def set_left(self, run: str, client: str) -> None:
        change = sa.update(clients).where(clients.c.run == run, clients.c.client == client)
        self._execute(change.values(has_left=True))

    def delete_client(self, run: str, client: str) -> None:
        self._execute(sa.delete(clients).where(clients.c.run == run, clients.c.client == client))

    def clients(self, run: str) -> list[ClientRow]:
        return self._sorted(ClientRow, sa.select(clients).where(clients.c.run == run))

    def put_round(self, row: RoundRow) -> None:
        self._put(rounds, row)

    def seal_round(self, run: str, round_num: int, sealed_at: float) -> None:
        self._execute(_round(run, round_num).values(status=SEALED, sealed_at=sealed_at))

    def open_masks(self, run: str, round_num: int, secure_json: str) -> None:
        self._execute(_round(run, round_num).values(secure_json=secure_json))

    def commit_round(
        self, run: str, round_num: int, record_json: str, state_json: str, model_version: int
    ) -> None:
        self._execute(
            _round(run, round_num).values(status=COMMITTED, record_json=record_json, secure_json=""),
            sa.update(runs)
            .where(runs.c.name == run)
            .values(state_json=state_json, model_version=model_version),
            sa.delete(reports).where(reports.c.run == run, reports.c.round_num <= round_num),
        )

    def close_round(
        self, run: str, round_num: int, record_json: str, best: tuple[int, float] | None = None
    ) -> None:
        statements = [_round(run, round_num).values(status=CLOSED, record_json=record_json)]
        if best is not None:
            version, accuracy = best
            better = sa.update(runs).where(runs.c.name == run)
            statements.append(better.values(best_version=version, best_accuracy=accuracy))
        self._execute(*statements)

    def round(self, run: str, round_num: int) -> RoundRow | None:
        key = (rounds.c.run == run, rounds.c.round_num == round_num)
        return self._first(RoundRow, sa.select(rounds).where(*key))

    def last_round(self, run: str) -> RoundRow | None:
        newest = sa.select(rounds).where(rounds.c.run == run).order_by(rounds.c.round_num.desc())
        return self._first(RoundRow, newest.limit(1))

    def records(self, run: str, start: int = 0, limit: int = 1_000_000) -> list[str]:
        wanted = (rounds.c.run == run, rounds.c.status == CLOSED, rounds.c.round_num >= start)
        query = sa.select(rounds.c.record_json).where(*wanted).order_by(rounds.c.round_num).limit(limit)
        with self._reading() as connection:
            return list(connection.execute(query).scalars())

    def put_report(self, row: ReportRow) -> None:
        self._put(reports, row)

    def reports(self, run: str, round_num: int) -> list[ReportRow]:
        key = (reports.c.run == run, reports.c.round_num == round_num)
        return self._sorted(ReportRow, sa.select(reports).where(*key))

    def put_code(self, row: CodeRow) -> None:
        self._put(codes, row)

    def code(self, sha256: str) -> CodeRow | None:
        return self._first(CodeRow, sa.select(codes).where(codes.c.sha256 == sha256))

    def drop_codes(self, keep: Collection[str], before: float) -> None:
        with self._writing() as connection:
            old = (
                connection.execute(sa.select(codes.c.sha256).where(codes.c.stored_at < before)).scalars().all()
            )
            for sha256 in set(old) - set(keep):
                connection.execute(sa.delete(codes).where(codes.c.sha256 == sha256))

    def put_agents(self, rows: Sequence[AgentRow]) -> None:
        self._put(agents, *rows)

    def delete_agents(self, names: Sequence[str]) -> None:
        self._execute(sa.delete(agents).where(agents.c.name.in_(names)))

    def agents(self) -> list[AgentRow]:
        return self._all(AgentRow, sa.select(agents))

    def close(self) -> None:
        self._engine.dispose()

    def _put(self, table: sa.Table, *rows: ClientRow | RoundRow | ReportRow | CodeRow | AgentRow) -> None:
        with self._writing() as connection:
            connection.execute(self._upserts[table.name], [vars(row) for row in rows])

    def _upsert(self, table: sa.Table) -> sa.Executable:
        """Insert or replace."""
        statement = self._insert(table)
        changed = {column.name: statement.excluded[column.name] for column in table.columns}
        return statement.on_conflict_do_update(index_elements=list(table.primary_key.columns), set_=changed)

    def _execute(self, *statements: sa.Executable) -> None:
        with self._writing() as connection:
            for statement in statements:
                connection.execute(statement)

    def _first(self, cls: type[Row], query: sa.Select[Any]) -> Row | None:
        return next(iter(self._all(cls, query)), None)

    def _all(self, cls: type[Row], query: sa.Select[Any]) -> list[Row]:
        try:
            with self._reading() as connection:
                found = connection.execute(query).mappings()
                # The driver's names of columns are a kind of text of their own.
                return [msgspec.convert({str(name): row[name] for name in row}, cls) for row in found]
        except (msgspec.ValidationError, ValueError, TypeError, LookupError, OverflowError) as error:
            raise _damaged(self._engine, error) from None

    def _sorted(self, cls: type[Row], query: sa.Select[Any]) -> list[Row]:
        """By client; not in SQL, where the order of letters depends on the database's locale."""
        return sorted(self._all(cls, query), key=lambda row: str(getattr(row, "client", "")))

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._writing() as connection:
            self._joint.connection = connection
            try:
                yield
            finally:
                del self._joint.connection

    def _writing(self) -> AbstractContextManager[sa.Connection]:
        joint: sa.Connection | None = getattr(self._joint, "connection", None)
        return nullcontext(joint) if joint else self._transaction(self._engine, self._write_lock)

    def _reading(self) -> AbstractContextManager[sa.Connection]:
        return self._transaction(self._reading_engine, self._read_lock)

    @contextmanager
    def _transaction(self, engine: sa.Engine, lock: AbstractContextManager[Any]) -> Iterator[sa.Connection]:
        try:
            with lock, engine.begin() as connection:
                yield connection
        except (exc.OperationalError, exc.InterfaceError, exc.TimeoutError) as error:
            cause = getattr(error, "orig", None) or error
            raise StoreUnavailable(
                f"database {engine.url}: {cause}; check that it is there and may be written to"
            ) from error
        except UnicodeDecodeError as error:  # of SQLite's own message about a damaged file
            raise _damaged(engine, error) from None
        except exc.DatabaseError as error:
            if engine.dialect.name != "sqlite" or not any(sign in str(error.orig) for sign in DAMAGED):
                raise
            raise _damaged(engine, error.orig) from None


def _damaged(engine: sa.Engine, cause: object) -> ServiceError:
    return ServiceError(
        f"database {engine.url.database} is damaged ({cause}): put a backup in its place, or move it away to"
        " start without runs; the models are still at the aggregators"
    )


def _round(run: str, round_num: int) -> sa.Update:
    return sa.update(rounds).where(rounds.c.run == run, rounds.c.round_num == round_num)


def new_engine(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "postgresql":
        return sa.create_engine(parsed, pool_pre_ping=True)
    if parsed.get_backend_name() != "sqlite":
        raise exc.ArgumentError(f"'{parsed.get_backend_name()}' is not a database that the coordinator knows")
    arguments = {"check_same_thread": False, "timeout": LOCKED_SECONDS}
    if parsed.database in (None, "", ":memory:"):
        engine = sa.create_engine(parsed, connect_args=arguments, poolclass=StaticPool)
    else:
        engine = sa.create_engine(parsed, connect_args=arguments)
    sa.event.listen(engine, "connect", _prepare_sqlite)
    # Left to itself the driver does not put schema changes into the transaction.
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _locks(engine: sa.Engine) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """For writing and for reading. A SQLite file has one writer, but its readers wait for nobody."""
    if engine.dialect.name != "sqlite":
        return nullcontext(), nullcontext()
    lock = threading.Lock()
    has_one_connection = isinstance(engine.pool, StaticPool)
    return lock, lock if has_one_connection else nullcontext()


def _begin_sqlite(connection: sa.Connection) -> None:
    """A writer takes the file's lock at once: if another writes between its read and its write, it fails."""
    only_reads = connection.get_execution_options().get("only_reads", False)
    connection.exec_driver_sql("BEGIN" if only_reads else "BEGIN IMMEDIATE")


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {setting}")
