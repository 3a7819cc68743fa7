"""Who may look at the page, under which name, how often and for how long."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve as aggregating
from fedel_coordinator.web import api
from fedel_services import visitors

from tests.federation.support import until
from tests.services.coordinator.support import RUN, asynchronous, run_config
from tests.web.browser import browsing, program
from tests.web.support import TOKEN, Asker, shown

VIEW = "look-only"
STEP_SECONDS = 20.0


async def connected(asker: Asker) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = asker.address.removeprefix("http://").rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def answered(asker: Asker, request: bytes) -> bytes:
    reader, writer = await connected(asker)
    writer.write(request)
    status = await asyncio.wait_for(reader.readline(), STEP_SECONDS)
    writer.close()
    return status


@asynchronous
async def test_a_foreign_name_that_points_here_is_refused(tmp_path: Path) -> None:
    async with shown(tmp_path, http_hosts=("page.lan",)) as (_, asker):
        for path in ("/", "/api/runs", "/metrics"):
            status, answer = await asker.ask(path, Host="evil.example:7080")
            assert (421, True) == (status, "http_hosts" in answer["error"])
        for host in ("localhost", "127.0.0.1:80", "[::1]:7080", "10.0.0.7", "Page.lan:7080"):
            assert 200 == (await asker.ask("/api/runs", Host=host))[0], host


@asynchronous
async def test_an_aggregator_checks_names_too(tmp_path: Path) -> None:
    port_file = tmp_path / "address"
    config = AggregatorConfig(
        listen="127.0.0.1:0",
        data_dir=tmp_path,
        http="127.0.0.1:0",
        http_port_file=port_file,
        http_hosts=("aggregator",),
    )
    async with aggregating(config), ClientSession() as session:
        for host, expected in (("evil.example", 421), ("aggregator:7081", 200), ("10.0.0.7", 200)):
            url, headers = f"http://{port_file.read_text()}/metrics", {"Host": host}
            async with session.get(url, headers=headers) as answer:
                assert expected == answer.status, host


@asynchronous
async def test_slow_headers_and_silence_end_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(visitors, "FIRST_SECONDS", 0.3)
    async with shown(tmp_path) as (_, asker):
        for first in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
            reader, writer = await connected(asker)
            writer.write(first)

            async def drip(writer: asyncio.StreamWriter = writer) -> None:
                while True:
                    writer.write(b"x")
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip()) if first else None
            try:
                await asyncio.wait_for(reader.read(), STEP_SECONDS)
            except ConnectionError:
                pass
            finally:
                if dripping:
                    dripping.cancel()
                writer.close()
        assert 200 == (await asker.ask("/healthz"))[0]


@asynchronous
async def test_a_follower_that_is_quiet_is_not_taken_for_a_silent_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(visitors, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(visitors, "NEXT_SECONDS", 0.2)
    async with shown(tmp_path, heartbeat_seconds=0.5) as (federation, asker):
        await federation.create(run_config())
        async with asker.events(RUN) as events:
            seen = 0
            async for kind, _ in events:
                seen += kind == "seen"
                if seen == 2:
                    break


@asynchronous
async def test_an_answer_that_nobody_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visitors, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(visitors, "UNREAD_SECONDS", 0.3)
    monkeypatch.setattr(visitors, "REQUEST_BURST", 1_000_000)
    async with shown(tmp_path) as (_, asker):
        host, _, port = asker.address.removeprefix("http://").rpartition(":")
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect((host, int(port)))
        raw.setblocking(False)

        async def ask_on() -> None:
            request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
            while True:
                await asyncio.get_running_loop().sock_sendall(raw, request)

        with raw, pytest.raises(ConnectionError):
            await asyncio.wait_for(ask_on(), STEP_SECONDS)


@asynchronous
async def test_one_address_has_a_share_of_requests_and_followers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "MAX_OF_VISITOR", 1)
    monkeypatch.setattr(visitors, "REQUEST_BURST", 20)
    monkeypatch.setattr(visitors, "REQUEST_SECONDS", 1000.0)
    async with shown(tmp_path) as (federation, asker):
        await federation.create(run_config())
        async with asker.events(RUN) as events:
            await anext(events)
            status, answer = await asker.ask(f"/api/runs/{RUN}/events")
            assert (503, True) == (status, "1 of one address" in answer["error"])
        found = [(await asker.ask("/healthz"))[0] for _ in range(25)]
    assert {200, 429} == set(found)
    assert 18 == found.count(200)


@asynchronous
async def test_too_many_connections_of_one_address_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visitors, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(visitors, "MAX_CONNECTIONS", 3)
    async with shown(tmp_path) as (_, asker):
        made = [await connected(asker) for _ in range(6)]
        await until(lambda: sum(reader.at_eof() for reader, _ in made) == 3, "three to be ended", STEP_SECONDS)
        for _, writer in made:
            writer.close()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
        b"GET /\xff HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=["header", "version", "length", "chunk"],
)
@asynchronous
async def test_what_is_no_request_leaves_nothing_in_the_log(
    tmp_path: Path, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Anyone who reaches the port can send it, as often as they like."""
    async with shown(tmp_path) as (_, asker):
        for _ in range(5):
            assert b" 400 " in await answered(asker, request_)
    assert [] == [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(("view", "status"), [("", b" 403 "), (VIEW, b" 401 ")])
@asynchronous
async def test_a_token_of_any_bytes_is_only_wrong(tmp_path: Path, view: str, status: bytes) -> None:
    async with shown(tmp_path, http_token=TOKEN, http_view_token=view) as (federation, asker):
        await federation.create(run_config())
        for token in (b"\xff\xfe", b"\xc3", "schlüssel".encode(), b""):
            head = b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + token + b"\r\n\r\n"
            cookie = b"Cookie: fedel_view=" + token + b"\r\n"
            request = f"POST /api/runs/{RUN}/stop".encode() + head
            assert status in await answered(asker, request)
            assert status in await answered(asker, request.replace(b"Auth", cookie + b"Auth"))


@asynchronous
async def test_with_a_view_token_nobody_looks_without(tmp_path: Path) -> None:
    async with shown(tmp_path, http_view_token=VIEW, http_token=TOKEN) as (federation, asker):
        await federation.create(run_config())
        data = ("/api/runs", "/%61pi/runs", f"/api/runs/{RUN}", f"/api/runs/{RUN}/events", "/metrics")
        for path in data:
            status, answer = await asker.ask(path)
            assert (401, True) == (status, "http_view_token" in answer["error"]), path
        for path in ("/", "/page.js", "/healthz"):
            assert 200 == (await asker.raw(path))[0].status, "these hold no data"
        for token in (VIEW, TOKEN):
            assert 200 == (await asker.ask("/api/runs", Authorization=f"Bearer {token}"))[0]
        view = {"Authorization": f"Bearer {VIEW}"}
        assert 403 == (await asker.ask(f"/api/runs/{RUN}/stop", "POST", **view))[0], "looking is not control"
        assert 401 == (await asker.ask("/api/login", "POST", Authorization="Bearer wrong"))[0]
        assert 401 == (await asker.ask("/api/runs"))[0]


@pytest.mark.skipif(program() is None, reason="Chromium is missing: apt-get install chromium")
@asynchronous
async def test_the_page_asks_for_the_token_once(tmp_path: Path) -> None:
    async with (
        shown(tmp_path, http_view_token=VIEW) as (federation, asker),
        browsing(tmp_path / "profile") as page,
    ):
        await federation.create(run_config())
        await page.open(asker.address)
        await page.until("!document.getElementById('login').hidden")
        assert await page.run("document.getElementById('main').hidden")
        for token, done in (("wrong", "document.getElementById('login-answer').textContent"), (VIEW, "true")):
            await page.run(f"document.getElementById('view-token').value = '{token}'")
            await page.run("document.getElementById('login').requestSubmit()")
            await page.until(done)
        await page.until(f"document.getElementById('name').textContent === '{RUN}'")
        await page.until("document.getElementById('link').className === 'live'")
        assert await page.run("document.getElementById('login').hidden")
        assert "" == await page.run("document.cookie"), "scripts cannot read it"
