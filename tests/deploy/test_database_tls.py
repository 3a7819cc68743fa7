"""The pods reach PostgreSQL over TLS that is verified, with the secret as docs/kubernetes.md makes it."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from fedel.chaos.postgres import Postgres, binaries
from fedel.security.authority import Authority
from fedel.security.identity import SERVICE, Identity
from tests.deploy.manifests import (
    EVERYTHING,
    SNAPSHOTS,
    container,
    environment,
    named,
    needs_kubectl,
    pod_templates,
    rendered,
)

PROGRAMS = binaries() or Path()
pytestmark = [
    needs_kubectl,
    pytest.mark.skipif(PROGRAMS == Path(), reason="PostgreSQL is missing: apt-get install postgresql"),
]
MOUNTED = Path("/etc/fedel-database")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One that the user of the server may read."""
    with tempfile.TemporaryDirectory(prefix="fedel-pg-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """Of a server for which TLS is the only way in; its authority is in ``folder/ca``."""
    Authority.create(folder / "ca").issue(folder / "own", Identity(SERVICE, "db"), ["localhost"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    server = Postgres(PROGRAMS, folder)
    server.make()
    data, owner = folder / "data", (folder / "data").stat()
    for name in ("cert.pem", "key.pem"):
        shutil.copy(folder / "own" / name, data)
        os.chown(data / name, owner.st_uid, owner.st_gid)
    (data / "pg_hba.conf").write_text("hostssl all all 127.0.0.1/32 trust\n")
    tls = "-c ssl=on -c ssl_cert_file=cert.pem -c ssl_key_file=key.pem"
    server.start(f"{tls} -c listen_addresses=127.0.0.1 -c port={port}")
    yield port
    server.stop()


def variables(pod: str, ca: Path) -> dict[str, str]:
    """With which a container calls libpq, where the file of the secret is ``ca``."""
    if pod == "coordinator":
        template = named(rendered("production"), "StatefulSet", "coordinator")["spec"]["template"]
    else:
        template = dict(pod_templates(rendered(EVERYTHING if pod == "backup" else SNAPSHOTS)))["backup"]
    found = container(template, "coordinator" if pod == "coordinator" else "backup")
    (mount,) = (each for each in found["volumeMounts"] if each["mountPath"] == str(MOUNTED))
    (volume,) = (each for each in template["spec"]["volumes"] if each["name"] == mount["name"])
    assert ("fedel-database", "ca.crt") == (
        volume["secret"]["secretName"],
        volume["secret"]["items"][0]["path"],
    )
    given = {key: value for key, value in environment(found).items() if key.startswith("PG")}
    return {key: value.replace(str(MOUNTED / "ca.crt"), str(ca)) for key, value in given.items()}


@pytest.mark.parametrize("pod", ["coordinator", "backup", "backup-snapshots"])
@pytest.mark.parametrize(
    ("host", "authority", "refusal"),
    [
        ("localhost", "ca", ""),
        ("127.0.0.1", "ca", "does not match host name"),
        ("localhost", "other", "certificate verify failed"),
        ("localhost", "missing", "does not exist"),
    ],
)
def test_the_database_is_verified(
    folder: Path, port: int, pod: str, host: str, authority: str, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Authority.create(folder / "other")
    for key, value in variables(pod, folder / authority / "ca.pem").items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("HOME", "/nowhere")
    url = f"postgresql://fedel@{host}:{port}/postgres"
    if refusal:
        with pytest.raises(psycopg.OperationalError, match=refusal):
            psycopg.connect(url)
    else:
        with psycopg.connect(url) as session:
            assert session.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone() == (
                True,
            )
