"""A PostgreSQL in a temporary folder, reached through a socket file, that can be restarted."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from fedel.errors import ServiceError

_NUMBERS = itertools.count()
_AS_USER = """
import os, sys
user, group, program, *arguments = sys.argv[1:]
os.setgroups([])
os.setgid(int(group))
os.setuid(int(user))
os.execv(program, [program, *arguments])
"""
"""Changes the user after the start: subprocess would fork Python for it beside the threads of gRPC, which
crashes now and then."""


def binaries() -> Path | None:
    """The folder that holds ``initdb`` and ``pg_ctl``; the newest version if there are several."""
    on_path = shutil.which("pg_ctl")
    folders = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda p: float(p.parent.name), reverse=True
    )
    candidates = ([Path(on_path).parent] if on_path else []) + folders
    return next((f for f in candidates if (f / "pg_ctl").exists() and (f / "initdb").exists()), None)


class Postgres:
    """A server; ``url`` is that of its first database."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self.url = f"postgresql+psycopg://fedel@/postgres?host={folder}"
        self._prefix: list[str] = []
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root
            account = pwd.getpwnam("nobody")
            os.chown(folder, account.pw_uid, account.pw_gid)
            self._prefix = [sys.executable, "-c", _AS_USER, str(account.pw_uid), str(account.pw_gid)]

    def make(self) -> None:
        self._run("initdb", "-U", "fedel", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale=C")

    def start(self, more: str = "") -> None:
        """With more options of the server, if given; it listens to nothing but a socket file without them."""
        options = f"-k {self._folder} -c listen_addresses='' -c fsync=off {more}"
        self._run("pg_ctl", "-w", "-l", str(self._folder / "server.log"), "-o", options, "start")

    def stop(self) -> None:
        """As a crash of the server would, without waiting for anyone."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._prefix, str(self._programs / program), "-D", str(self._folder / "data"), *arguments]
        log = self._folder / f"{program}.log"
        with log.open("a") as output:
            done = subprocess.run(
                command, cwd=self._folder, stdout=output, stderr=output, timeout=60, check=False
            )
        if done.returncode != 0:
            said = log.read_text(encoding="utf-8", errors="replace")
            raise ServiceError(f"{program} failed with exit code {done.returncode}: {said}")


@contextmanager
def postgres(programs: Path) -> Iterator[Postgres]:
    """A server that runs until the block ends."""
    # A folder that the server's own user may read.
    folder = Path(tempfile.mkdtemp(prefix="fedel-pg-"))
    try:
        server = Postgres(programs, folder)
        server.make()
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fresh_database(server: str) -> str:
    """URL of a new, empty database."""
    name = f"fedel_{next(_NUMBERS)}"
    engine = sa.create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return sa.make_url(server).set(database=name).render_as_string(hide_password=False)
