"""The coordinator's database in a backup: always a SQLite file, whatever database it comes from or goes to."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

import sqlalchemy as sa
from fedel_coordinator.migrations import STEPS, migrate
from fedel_coordinator.sql import metadata, new_engine
from sqlalchemy import exc

from fedel.backup.manifest import RunRounds
from fedel.errors import DataError, ServiceError
from fedel.roles.run_state import ENDED, SEALED

BATCH_ROWS = 1000
SCHEMA = "schema_version"


@contextmanager
def connected(url: str) -> Iterator[sa.Engine]:
    """The database of a coordinator; its errors are for people."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite" and not parsed.database:
        raise DataError(f"database_url = {url!r} keeps nothing: there is nothing to back up or restore")
    engine = new_engine(url)
    try:
        yield engine
    except exc.SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        raise ServiceError(f"database {engine.url}: {cause}; check that it is there and sound") from error
    finally:
        engine.dispose()


class Snapshot:
    """The database as it was when ``freeze`` began, to be read until it is closed."""

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        level = {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        self._reader = engine.connect().execution_options(only_reads=True, **level)

    def close(self) -> None:
        self._reader.close()

    @contextmanager
    def freeze(self) -> Iterator[None]:
        """Take the snapshot, and let no round go on meanwhile: every step of a round is written here first.

        The coordinator waits, as it does for a database that does not answer.
        """
        with self._engine.connect() as writer:
            if self._engine.dialect.name == "sqlite":
                writer.begin()  # takes the one lock for writing
            else:
                writer.execute(sa.text("LOCK TABLE rounds IN SHARE MODE"))
            _schema(self._reader)  # the first read is when the snapshot is of
            yield

    @property
    def schema(self) -> int:
        return _schema(self._reader)

    def rounds(self) -> dict[str, RunRounds]:
        query = sa.text(
            "SELECT name, phase, model_version, status FROM runs LEFT JOIN rounds"
            " ON rounds.run = runs.name AND rounds.round_num = runs.model_version"
        )
        return {
            row.name: RunRounds(row.phase, row.model_version, row.status == SEALED)
            for row in self._reader.execute(query)
        }

    def copy_to(self, path: Path) -> None:
        with connected(f"sqlite:///{path}") as engine, engine.begin() as target:
            migrate(target, STEPS[: self.schema])
            _copy_rows(self._reader, target)
        with closing(sqlite3.connect(path)) as file:
            file.execute("PRAGMA journal_mode = DELETE")  # all of it in one file, which reading does not change


@contextmanager
def snapshot(url: str) -> Iterator[Snapshot]:
    """Of a database that a coordinator may be using."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database and not Path(parsed.database).is_file():
        raise DataError(
            f"there is no database {parsed.database}: run this where the coordinator runs, with its settings"
        )
    with connected(url) as engine:
        with engine.connect() as connection:
            if not sa.inspect(connection).has_table(SCHEMA):
                raise DataError(f"database {engine.url} is empty: has the coordinator been started with it?")
            check_schema(_schema(connection), f"database {engine.url}")
        with closing(Snapshot(engine)) as taken:
            yield taken


def _schema(connection: sa.Connection) -> int:
    return int(connection.execute(sa.select(sa.column("version")).select_from(sa.table(SCHEMA))).scalar_one())


def check_schema(found: int, where: str) -> None:
    if found > len(STEPS):
        raise DataError(
            f"{where}: its schema is version {found}, this FedEL knows {len(STEPS)}: use the version of FedEL"
            " that made it, or a newer one"
        )


def is_empty(url: str) -> bool:
    """Whether nothing is lost if a database is replaced."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database and not Path(parsed.database).exists():
        return True
    with connected(url) as engine, engine.connect() as connection:
        return not any(
            connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1)).first()
            for table in _tables(connection)
        )


def restore(file: Path, schema: int, url: str) -> None:
    """Replace the database by the one of a backup, all of it or nothing, with the schema of this version."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    with _opened(file) as rows, connected(url) as engine, engine.begin() as target:
        found = sa.MetaData()
        found.reflect(target)
        found.drop_all(target)
        migrate(target, STEPS[:schema])
        _copy_rows(rows, target)
        migrate(target)
        _renew(target)


@contextmanager
def _opened(file: Path) -> Iterator[sa.Connection]:
    """The file of a backup, which nobody changes."""
    address = f"file:{quote(str(file.resolve()))}?mode=ro&immutable=1"
    engine = sa.create_engine("sqlite://", creator=lambda: sqlite3.connect(address, uri=True))
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _renew(target: sa.Connection) -> None:
    """Make every run that goes on another one for the devices, which tell runs of one name apart by the time of
    creation: what they kept is of rounds that now have not happened. They forget it, and get what they need
    from the coordinator."""
    ended: sa.BindParameter[list[str]] = sa.bindparam("ended", list(ENDED), expanding=True)
    later = sa.text("UPDATE runs SET created_at = created_at + :part WHERE phase NOT IN :ended")
    target.execute(later.bindparams(ended), {"part": time.time() % 1.0})


def _tables(connection: sa.Connection) -> list[sa.Table]:
    """All tables but that of the schema, those that others refer to first.

    The types are the coordinator's own where it knows the column: SQLite does not tell all of them.
    """
    found = sa.MetaData()
    found.reflect(connection)
    columns = [column for table in metadata.sorted_tables for column in table.columns]
    types = {(column.table.name, column.name): column.type for column in columns}
    for table in found.sorted_tables:
        for column in table.columns:
            column.type = types.get((table.name, column.name), column.type)
    return [table for table in found.sorted_tables if table.name != SCHEMA]


def _copy_rows(source: sa.Connection, target: sa.Connection) -> None:
    for table in _tables(source):
        found = source.execute(sa.select(table).execution_options(yield_per=BATCH_ROWS))
        for batch in found.mappings().partitions():
            target.execute(sa.insert(table), [dict(row) for row in batch])
