"""Plain text is for the loopback, unless somebody insists."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fedel_aggregator.__main__ import main as aggregator
from fedel_coordinator.__main__ import main as coordinator
from fedel_edge.__main__ import main as agent

from fedel.errors import ConfigError
from fedel.security.tls import Tls
from fedel.wire.channel import connect


@pytest.mark.parametrize("address", ["0.0.0.0:0", ":0", "server:7070", "10.0.0.1:7070", "[::]:7070"])
def test_plain_text_is_refused_off_the_loopback(address: str) -> None:
    for tls in (Tls(), Tls(insecure=True), Tls(dir="certs", insecure=True)):
        with pytest.raises(ConfigError, match=r"is not a loopback address.*fedel certs"):
            tls.check(address)
    assert "from any machine" in Tls(insecure_anywhere=True).check(address)
    assert "mTLS" in Tls(dir="certs").check(address)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:7070", "[::1]:7070"])
def test_plain_text_on_the_loopback_says_what_it_means(address: str) -> None:
    assert "anyone who can reach the port" in Tls().check(address)
    assert "anyone who can reach the port" in Tls(dir="certs", insecure=True).check(address)


def test_nothing_is_dialled_in_plain_text_off_the_loopback() -> None:
    async def dial() -> None:
        connect("server:7070")

    with pytest.raises(ConfigError, match="is not a loopback address"):
        asyncio.run(dial())


def test_servers_and_agents_do_not_start_without_certificates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = ["--set", "log_level=ERROR"]
    data = ["--set", f"data_dir={tmp_path / 'data'}", "--set", f"state_dir={tmp_path / 'state'}"]
    database = ["--set", f"database_url=sqlite:///{tmp_path / 'c.db'}"]
    assert 2 == aggregator(["--set", "listen=0.0.0.0:0", "--insecure", *data[:2], *quiet])
    assert 2 == coordinator(["--set", "listen=0.0.0.0:0", *database, *quiet])
    assert 2 == coordinator(["--set", 'aggregators=["server:7071"]', *database, *quiet])
    assert 2 == agent(["--set", "coordinator=server:7070", *data[2:], *quiet])
    assert 4 == capsys.readouterr().err.count("is not a loopback address")


def test_a_folder_without_certificates_names_the_missing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 8 == agent(["--set", f"tls.dir={tmp_path}", "--set", "log_level=ERROR"])
    assert f"{tmp_path / 'ca.pem'} is missing" in capsys.readouterr().err
