"""A real PostgreSQL for the tests, in a temporary folder, reached through a socket file."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

_NUMBERS = itertools.count()


def binaries() -> Path | None:
    """The folder that holds ``initdb`` and ``pg_ctl``; the newest version if there are several."""
    on_path = shutil.which("pg_ctl")
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True
    )
    candidates = ([Path(on_path).parent] if on_path else []) + folders
    return next((f for f in candidates if (f / "pg_ctl").exists() and (f / "initdb").exists()), None)


@contextmanager
def postgres(programs: Path) -> Iterator[str]:
    """Yields the URL of the server's first database."""
    # Not pytest's own folder: PostgreSQL refuses to run as root, and other users may not read that one.
    folder = Path(tempfile.mkdtemp(prefix="fedel-pg-"))
    user: dict[str, Any] = {}
    if os.geteuid() == 0:
        account = pwd.getpwnam("nobody")
        os.chown(folder, account.pw_uid, account.pw_gid)
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}

    def run(program: str, *arguments: str) -> None:
        command = [str(programs / program), "-D", str(folder / "data"), *arguments]
        log = folder / f"{program}.log"
        with log.open("a") as output:
            done = subprocess.run(command, cwd=folder, stdout=output, stderr=output, timeout=60, **user)
        assert 0 == done.returncode, log.read_text()

    try:
        run("initdb", "-U", "fedel", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        run("pg_ctl", "-w", "-l", str(folder / "server.log"), "-o", options, "start")
        try:
            yield f"postgresql+psycopg://fedel@/postgres?host={folder}"
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fresh_database(server: str) -> str:
    """URL of a new, empty database."""
    name = f"test_{next(_NUMBERS)}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)
