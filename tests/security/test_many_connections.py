"""Many connections at once do a server no harm."""

from __future__ import annotations

import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import create_connection
from typing import Any

import grpc
import pytest

from fedel.security.folder import Watched
from fedel.wire import channel
from tests.security.support import Pki

AT_ONCE, CONNECTIONS = 16, 400
PATIENCE_SECONDS = 60.0


def test_grpc_is_told_only_of_a_new_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told again of what it has, gRPC replaces what other handshakes use, and the process dies."""
    asked: list[Any] = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda _, fetch, __: asked.append(fetch))
    pki = Pki(tmp_path)
    watched = Watched(pki.tls("service", "aggregator").folder)
    channel.server_credentials(watched)
    assert [None, None] == [asked[0](), asked[0]()]
    pki.due("service", "aggregator")
    assert [True, False] == [asked[0]() is not None, asked[0]() is not None]


@pytest.mark.parametrize("who", ["a device", "nobody"])
def test_a_server_survives_many_handshakes_at_once(tmp_path: Path, who: str) -> None:
    pki = Pki(tmp_path)
    tls, agent = pki.tls("service", "aggregator"), pki.tls("agent", "a")
    context = ssl.create_default_context(cafile=str(pki.authority.folder / "ca.pem"))
    if who == "a device":
        context.load_cert_chain(agent.folder / "cert.pem", agent.folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    port_file = tmp_path / "address"
    settings = {
        "listen": "127.0.0.1:0",
        "port_file": port_file,
        "data_dir": tmp_path / "data",
        "tls.dir": tls.dir,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen([sys.executable, "-m", "fedel_aggregator", *words], stdout=log, stderr=log) as server,
    ):
        try:
            while not port_file.exists():
                assert server.poll() is None
                time.sleep(0.02)
            host, _, port = port_file.read_text().rpartition(":")

            def shake_hands(_: int) -> None:
                with (
                    create_connection((host, int(port)), PATIENCE_SECONDS) as plain,
                    context.wrap_socket(plain, server_hostname=host),
                ):
                    pass

            with ThreadPoolExecutor(AT_ONCE) as pool:
                list(pool.map(shake_hands, range(CONNECTIONS)))
            assert server.poll() is None
        finally:
            server.terminate()
            assert 0 == server.wait(PATIENCE_SECONDS)
    assert len((tmp_path / "log").read_text().splitlines()) < 20, "a line for each handshake would fill the log"
