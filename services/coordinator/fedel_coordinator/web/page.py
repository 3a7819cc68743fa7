"""The coordinator over HTTP: the live page, its JSON, metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from fedel_services.http import new_app, serve_http
from fedel_services.visitors import check_host
from prometheus_client import CollectorRegistry

from fedel.security.tls import host_of
from fedel_coordinator.coordinator import Coordinator
from fedel_coordinator.gauges import Gauges
from fedel_coordinator.web.api import Api
from fedel_coordinator.web.events import capture_log
from fedel_coordinator.web.login import Login
from fedel_coordinator.web.reader import Reader

STATIC = Path(__file__).with_name("static")
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Written here, because the type that a machine gives to .js depends on its settings."""


@asynccontextmanager
async def serve_page(coordinator: Coordinator, registry: CollectorRegistry) -> AsyncIterator[str]:
    """Serve the page in this context, if the configuration has it; yields its address, or "" without a page."""
    config = coordinator.config
    if not config.http:
        yield ""
        return
    with capture_log() as events:
        files = {_path(file): file for file in STATIC.iterdir() if file.suffix in KINDS}
        login = Login(config.http_view_token, config.http_token, files)
        checks = (check_host([host_of(config.http), *config.http_hosts]), login.check_view)
        app = new_app(registry, Gauges(coordinator, coordinator.metrics).refresh, checks)
        Api(Reader(coordinator), events, login).add_to(app)
        for path, file in files.items():
            app.router.add_get(path, _sender(file))
        async with serve_http(app, config.http, config.http_port_file) as address:
            yield address


def _path(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/{file.name}"


def _sender(file: Path) -> Handler:
    headers = {"Cache-Control": "no-cache", "Content-Type": KINDS[file.suffix]}

    async def send(_request: web.Request) -> web.StreamResponse:
        return web.FileResponse(file, headers=headers)

    return send
