"""The backup's script against an API server of few words: a usable snapshot of each claim, old ones deleted."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from fedel.security.authority import Authority
from fedel.security.identity import SERVICE, Identity

SCRIPT = Path(__file__).parents[2] / "k8s/components/backup/snapshot.py"
OLD = [f"state-aggregator-0-2026010{day}-0317" for day in range(1, 5)]
NEVER = "state-aggregator-0-20260104-0317"
"""A snapshot of an earlier night that nobody took."""


class Api(BaseHTTPRequestHandler):
    claims: tuple[str, ...] = ("state-coordinator-0", "state-aggregator-0")
    snapshots: dict[str, str]
    asked: dict[str, int]
    """How often each new snapshot was asked for: it is ready at the second time."""
    works = True

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
        return found | ({"status": {"readyToUse": True}} if self.asked.get(name, 0) > 1 else {})

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


@pytest.fixture
def account(tmp_path: Path) -> Path:
    authority = Authority.create(tmp_path / "ca")
    authority.issue(tmp_path / "api", Identity(SERVICE, "api"), ["127.0.0.1"])
    for name, text in (("token", "secret"), ("namespace", "fedel")):
        (tmp_path / name).write_text(text, encoding="utf-8")
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


def run(account: Path, port: int) -> subprocess.CompletedProcess[str]:
    surroundings = {
        **os.environ,
        "ACCOUNT_DIR": str(account),
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(port),
        "KEEP": "2",
        "WAIT_SECONDS": "0.3",
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
    assert min(Api.asked.values()) > 1


def test_a_snapshot_that_cannot_be_used_fails_the_job_and_deletes_nothing(account: Path, port: int) -> None:
    Api.works = False
    done = run(account, port)
    assert 0 != done.returncode
    assert "the disk is full" in done.stderr
    assert set(OLD) < Api.snapshots.keys()


def test_a_refusal_fails_the_job(account: Path, port: int) -> None:
    (account / "token").write_text("wrong", encoding="utf-8")
    assert 0 != run(account, port).returncode
