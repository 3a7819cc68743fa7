"""The database schema as numbered steps, the same for SQLite and PostgreSQL; applied when the service starts.

A step that has been released is never edited: a change is a new step at the end.
"""

from __future__ import annotations

from sqlalchemy import Connection, inspect, text

from fedel.errors import ServiceError

STEPS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            name TEXT NOT NULL PRIMARY KEY,
            config_json TEXT NOT NULL,
            spec_json TEXT NOT NULL,
            num_shards INTEGER NOT NULL,
            phase TEXT NOT NULL,
            message TEXT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            ended_at DOUBLE PRECISION,
            state_json TEXT NOT NULL,
            model_version INTEGER NOT NULL,
            best_version INTEGER NOT NULL,
            best_accuracy DOUBLE PRECISION
        )""",
        """CREATE TABLE clients (
            run TEXT NOT NULL REFERENCES runs (name),
            client TEXT NOT NULL,
            device_type TEXT NOT NULL,
            memory_bytes BIGINT NOT NULL,
            agent_version TEXT NOT NULL,
            num_samples BIGINT NOT NULL,
            can_evaluate BOOLEAN NOT NULL,
            profile_json TEXT NOT NULL,
            last_seen DOUBLE PRECISION NOT NULL,
            has_left BOOLEAN NOT NULL,
            PRIMARY KEY (run, client)
        )""",
        """CREATE TABLE rounds (
            run TEXT NOT NULL REFERENCES runs (name),
            round_num INTEGER NOT NULL,
            status TEXT NOT NULL,
            plan_json TEXT NOT NULL,
            record_json TEXT NOT NULL,
            opened_at DOUBLE PRECISION NOT NULL,
            sealed_at DOUBLE PRECISION,
            closed_at DOUBLE PRECISION,
            PRIMARY KEY (run, round_num)
        )""",
        """CREATE TABLE reports (
            run TEXT NOT NULL REFERENCES runs (name),
            round_num INTEGER NOT NULL,
            client TEXT NOT NULL,
            report_json TEXT NOT NULL,
            phases_json TEXT NOT NULL,
            device_json TEXT NOT NULL,
            bytes_up BIGINT NOT NULL,
            bytes_down BIGINT NOT NULL,
            PRIMARY KEY (run, round_num, client)
        )""",
    ),
    # Were written and never read.
    ("ALTER TABLE clients DROP COLUMN last_seen", "ALTER TABLE rounds DROP COLUMN closed_at"),
    # What the clients of secure aggregation revealed: a commit that was begun can be finished.
    ("ALTER TABLE rounds ADD COLUMN secure_json TEXT NOT NULL DEFAULT ''",),
    # One row per agent that ever had a session.
    (
        """CREATE TABLE agents (
            name TEXT NOT NULL PRIMARY KEY,
            device_type TEXT NOT NULL,
            memory_bytes BIGINT NOT NULL,
            agent_version TEXT NOT NULL,
            protocol INTEGER NOT NULL,
            labels_json TEXT NOT NULL,
            operator_labels_json TEXT NOT NULL,
            cordoned BOOLEAN NOT NULL,
            certificate_end DOUBLE PRECISION NOT NULL,
            last_seen DOUBLE PRECISION NOT NULL,
            up_rate DOUBLE PRECISION NOT NULL,
            down_rate DOUBLE PRECISION NOT NULL,
            error_at DOUBLE PRECISION NOT NULL,
            error_run TEXT NOT NULL,
            error_round INTEGER NOT NULL,
            error_message TEXT NOT NULL,
            error_trace TEXT NOT NULL
        )""",
    ),
    # Code that came with jobs. To SQLite any type is right.
    (
        """CREATE TABLE codes (
            sha256 TEXT NOT NULL PRIMARY KEY,
            content BYTEA NOT NULL,
            stored_at DOUBLE PRECISION NOT NULL
        )""",
    ),
    # Samples that a client tests models on and does not train on.
    ("ALTER TABLE clients ADD COLUMN num_held_out BIGINT NOT NULL DEFAULT 0",),
    # What the model of a run takes, for those who fetch its result.
    ("ALTER TABLE runs ADD COLUMN input_json TEXT NOT NULL DEFAULT ''",),
)


def migrate(connection: Connection, steps: tuple[tuple[str, ...], ...] = STEPS) -> None:
    """Bring the schema up to date, in the caller's transaction."""
    if not inspect(connection).has_table("schema_version"):
        connection.execute(text("CREATE TABLE schema_version (version INTEGER NOT NULL)"))
        connection.execute(text("INSERT INTO schema_version VALUES (0)"))
    found = connection.execute(text("SELECT version FROM schema_version")).scalars().all()
    if len(found) != 1 or type(found[0]) is not int or found[0] < 0:
        raise ServiceError(
            f"database {connection.engine.url} is damaged (schema_version holds {found}): use a backup"
        )
    version = found[0]
    if version > len(steps):
        raise ServiceError(
            f"database {connection.engine.url}: its schema is version {version}, this coordinator knows"
            f" {len(steps)}: start the newer coordinator that made it, or name another database_url"
        )
    for number, step in enumerate(steps[version:], start=version + 1):
        for statement in step:
            connection.execute(text(statement))
        connection.execute(text("UPDATE schema_version SET version = :number"), {"number": number})
