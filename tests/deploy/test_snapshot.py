"""The script of backup-snapshots against an API server of few words: a usable snapshot of each claim, taken
while the database is frozen, and old ones deleted."""

from __future__ import annotations

import json
import os
import sqlite3
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from fedel_coordinator.sql import SqlStore

from fedel.backup import manifest
from fedel.security.authority import Authority
from fedel.security.identity import SERVICE, Identity
from tests.backup.test_files import fill
from tests.deploy.manifests import SNAPSHOTS, container, needs_kubectl, pod_templates, rendered

SCRIPT = Path(__file__).parents[2] / "k8s/components/backup-snapshots/snapshot.py"
OLD = [f"state-aggregator-0-2026010{day}-0317" for day in range(1, 5)]
NEVER = "state-aggregator-0-20260104-0317"
"""A snapshot of an earlier night that nobody took."""


class Api(BaseHTTPRequestHandler):
    claims: tuple[str, ...] = ("state-coordinator-0", "state-aggregator-0")
    snapshots: dict[str, str]
    asked: dict[str, int]
    """How often each new snapshot was asked for: it is ready at the second time."""
    works = True
    database: Path
    was_frozen: bool
    """Whether nobody could write to the database when the last snapshot was cut."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if not address.query:
            name = address.path.rpartition("/")[2]
            self.asked[name] = self.asked.get(name, 0) + 1
            self.answer(self.snapshot(name))
            return
        (selector,) = parse_qs(address.query)["labelSelector"]
        if address.path == "/api/v1/namespaces/fedel/persistentvolumeclaims":
            assert "app.kubernetes.io/name in (coordinator,aggregator)" == selector
            self.answer({"items": [{"metadata": {"name": name}} for name in self.claims]})
        else:
            claim = selector.removeprefix("fedel/claim=")
            names = [name for name, of in self.snapshots.items() if of == claim]
            self.answer({"items": [self.snapshot(name) for name in names]})

    def snapshot(self, name: str) -> dict[str, object]:
        found: dict[str, object] = {"metadata": {"name": name}}
        if name in OLD:
            return found | {"status": {"readyToUse": name != NEVER}}
        if not self.works:
            return found | {"status": {"readyToUse": False, "error": {"message": "the disk is full"}}}
        times = self.asked.get(name, 0)
        if times < 2:
            return found
        if times == 2:
            Api.was_frozen = is_frozen(self.database)
        return found | {"status": {"creationTime": "2026-01-31T03:17:00Z", "readyToUse": times > 3}}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert "VolumeSnapshot" == body["kind"]
        assert body["metadata"]["labels"]["fedel/claim"] == body["spec"]["source"]["persistentVolumeClaimName"]
        self.snapshots[body["metadata"]["name"]] = body["spec"]["source"]["persistentVolumeClaimName"]
        self.answer(body)

    def do_DELETE(self) -> None:
        del self.snapshots[self.path.rpartition("/")[2]]
        self.answer({})

    def answer(self, body: object) -> None:
        known = self.headers["Authorization"] == "Bearer secret"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def is_frozen(database: Path) -> bool:
    with closing(sqlite3.connect(database, timeout=0.0)) as writer:
        try:
            writer.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


@pytest.fixture
def account(tmp_path: Path) -> Path:
    authority = Authority.create(tmp_path / "ca")
    authority.issue(tmp_path / "api", Identity(SERVICE, "api"), ["127.0.0.1"])
    for name, text in (("token", "secret"), ("namespace", "fedel")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    Api.database, Api.was_frozen = tmp_path / "coordinator.db", False
    store = SqlStore(f"sqlite:///{Api.database}")
    fill(store)
    store.close()
    (tmp_path / "backup" / "20260101-0317").mkdir(parents=True)
    (tmp_path / "backup" / "20260102-0317").mkdir()
    (tmp_path / "ca.crt").write_bytes((tmp_path / "ca" / "ca.pem").read_bytes())
    return tmp_path


@pytest.fixture
def port(account: Path) -> Iterator[int]:
    Api.snapshots, Api.asked, Api.works = dict.fromkeys(OLD, "state-aggregator-0"), {}, True
    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "api" / "cert.pem", account / "api" / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def run(account: Path, port: int, seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    surroundings = {
        **os.environ,
        "ACCOUNT_DIR": str(account),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(port),
        "BACKUP_DIR": str(account / "backup"),
        "FEDEL_DATABASE_URL": f"sqlite:///{Api.database}",
        "KEEP": "2",
        "CUT_SECONDS": str(seconds),
        "WAIT_SECONDS": str(seconds),
        "POLL_SECONDS": "0.05",
    }
    return subprocess.run(
        [sys.executable, SCRIPT], env=surroundings, capture_output=True, text=True, check=False
    )


def test_every_claim_gets_a_snapshot_and_old_ones_go(account: Path, port: int) -> None:
    done = run(account, port)
    assert 0 == done.returncode, done.stderr
    of_aggregator = sorted(name for name, claim in Api.snapshots.items() if claim == "state-aggregator-0")
    assert OLD[2:] == of_aggregator[:-1], "two that can be used, and nothing that is older"
    assert 1 == sum(claim == "state-coordinator-0" for claim in Api.snapshots.values())
    assert 2 == len(Api.asked)
    assert Api.was_frozen
    assert not is_frozen(Api.database)
    old, new = sorted((account / "backup").iterdir())
    assert "20260102-0317" == old.name
    assert {"night-1", "old"} == manifest.read(new).runs.keys()
    assert {f"state-coordinator-0-{new.name}", f"state-aggregator-0-{new.name}"} < Api.snapshots.keys()


def test_a_snapshot_that_cannot_be_used_fails_the_job_and_deletes_nothing(account: Path, port: int) -> None:
    Api.works = False
    done = run(account, port, seconds=0.1)
    assert 0 != done.returncode
    assert "the disk is full" in done.stderr
    assert set(OLD) < Api.snapshots.keys()
    assert 2 == len(list((account / "backup").iterdir()))


def test_a_refusal_fails_the_job(account: Path, port: int) -> None:
    (account / "token").write_text("wrong", encoding="utf-8")
    assert 0 != run(account, port).returncode


@needs_kubectl
def test_the_job_restores_the_database_of_a_night(account: Path, port: int) -> None:
    assert 0 == run(account, port).returncode
    Api.database.unlink()
    job = container(dict(pod_templates(rendered(SNAPSHOTS)))["backup"], "backup")
    surroundings = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FEDEL_DATABASE_URL": f"sqlite:///{Api.database}",
        "RESTORE": max(each.name for each in (account / "backup").iterdir()),
    }
    script = job["args"][0].replace("/backup/", f"{account}/backup/")
    subprocess.run([*job["command"], script], env=surroundings, check=True)
    store = SqlStore(f"sqlite:///{Api.database}")
    assert ["night-1", "old"] == sorted(run.name for run in store.runs())
    store.close()
