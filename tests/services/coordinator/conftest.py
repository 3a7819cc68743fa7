from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedel.chaos.postgres import binaries, postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: no initdb and pg_ctl on PATH or under /usr/lib/postgresql")
    with postgres(programs) as server:
        yield server.url
