"""What people read who dial a wrong port or a wrong name, or have no certificate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fedel_edge.preflight.reach import reach

from fedel.desk.submit import list_runs
from fedel.errors import CertificateError, ServiceError
from fedel.security.folder import load
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from fedel.security.tokens import Token
from fedel.wire.enrol import enrol, fetch_authority
from tests.security import support
from tests.security.support import Pki, servers
from tests.services.coordinator.support import asynchronous


class Page(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def web_page() -> Iterator[str]:
    """A port that answers as the page does to what is not HTTP/1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@asynchronous
async def test_another_port_is_recognised(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    operator, agent = pki.tls("operator", "ada"), load(pki.tls("agent", "a").folder)
    with web_page() as page:
        async with servers(tmp_path, pki) as made:
            with pytest.raises(ServiceError, match="another service, or an older version: by default a"):
                await list_runs(made.aggregator_address, operator)
            with pytest.raises(ServiceError, match=r"does not use certificates; is it the page\? .* on 7070"):
                await list_runs(page, operator)
            with pytest.raises(
                ServiceError, match=r"no gRPC server is at this port; is it the page\? .* on 7070"
            ):
                await list_runs(page, Tls())
            found = (await reach("coordinator", made.aggregator_address, agent)).finding
            assert "is not the coordinator: the server at this port is another service" in found.said
            assert "correct the address or its port" == found.remedy
            plain = (await reach("coordinator", page, None)).finding
            assert "is not the coordinator: no gRPC server is at this port; is it the page?" in plain.said


@asynchronous
async def test_a_missing_certificate_is_the_first_thing_said(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    async with servers(tmp_path, pki) as made:
        with pytest.raises(ServiceError, match=r"cannot reach [\d.:]+: no certificate was given \(--certs"):
            await list_runs(made.coordinator_address, Tls())
        ada = pki.tls("operator", "ada")
    with pytest.raises(ServiceError, match=f"does it accept the certificate in {ada.dir}"):
        await list_runs(made.coordinator_address, ada)


async def enrolled(at: str, token: Token, folder: Path) -> None:
    await enrol(at, token, folder, await asyncio.to_thread(fetch_authority, at, token.fingerprint))


@asynchronous
async def test_enrolling_at_another_port_names_the_right_one(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    token = pki.authority.promise(Identity("agent", "b"))
    with web_page() as page:
        async with servers(tmp_path, pki) as made:
            for at in (made.coordinator_address, made.aggregator_address, page):
                with pytest.raises(
                    ServiceError, match=r"is this the enrolment port of the coordinator \(7072\)\?"
                ):
                    await enrolled(at, token, tmp_path / "b")


@asynchronous
async def test_a_name_that_is_not_in_the_certificate_is_told_apart(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(support, "HOSTS", ("127.0.0.1", "server.lan"))
    pki = Pki(tmp_path)
    token, operator = pki.authority.promise(Identity("agent", "b")), pki.tls("operator", "ada")
    async with servers(tmp_path, pki) as made:
        port = made.enrolment_address.rpartition(":")[2]
        with pytest.raises(
            CertificateError, match=r"is for server.lan, 127.0.0.1, not for localhost.*--host localhost"
        ):
            await enrolled(f"localhost:{port}", token, tmp_path / "b")
        with pytest.raises(
            ServiceError, match="for other names than this one: use a name that is in it, or issue it"
        ):
            await list_runs(f"localhost:{made.coordinator_address.rpartition(':')[2]}", operator)
        await enrolled(made.enrolment_address, token, tmp_path / "b")
