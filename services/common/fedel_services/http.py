"""The HTTP side of a service: ``/healthz``, ``/metrics``, and the headers of every answer."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import (
    CollectorRegistry,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from fedel.errors import FedelError, ServiceError
from fedel.files import write_atomic
from fedel.telemetry import build_info
from fedel_services.visitors import Connections, Problem, limit_requests

log = logging.getLogger(__name__)

STOP_SECONDS = 2.0
"""How long running requests may still take when the service stops."""
TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus' text format, in the version that every Prometheus reads."""
FOLLOWERS = web.AppKey("followers", dict[asyncio.Task[None], str])
"""Tasks that answer a request without end, and their visitors: they are cancelled when the service stops."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _is_of_ours(record: logging.LogRecord) -> bool:
    """Not about bytes that are no request: they are answered with 400, and anyone can send any number."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_requests_log = logging.getLogger(f"{__name__}.requests")
_requests_log.addFilter(_is_of_ours)


def new_registry(service: str) -> CollectorRegistry:
    """A registry with the metrics of every process: memory, CPU, Python, version."""
    # A second series per counter, with the time of its creation, would say nothing new.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    build_info(registry, service)
    return registry


def new_app(
    registry: CollectorRegistry, refresh: Callable[[], None], checks: Sequence[Middleware] = ()
) -> web.Application:
    """Health and metrics; ``refresh`` sets the gauges of the current state before each scrape.

    ``checks`` see every request before it is answered.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def metrics(request: web.Request) -> web.Response:
        refresh()
        zipped = "gzip" in request.headers.get("Accept-Encoding", "")
        text = await asyncio.to_thread(_exposition, registry, zipped)
        headers = {"Content-Type": TEXT_FORMAT} | ({"Content-Encoding": "gzip"} if zipped else {})
        return web.Response(body=text, headers=headers)

    app = web.Application(middlewares=[_errors_as_json, limit_requests(), *checks])
    app[FOLLOWERS] = {}
    app.on_response_prepare.append(_add_headers)
    app.on_shutdown.append(_end_followers)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/metrics", metrics)
    return app


@asynccontextmanager
async def serve_http(app: web.Application, address: str, port_file: Path | None = None) -> AsyncIterator[str]:
    """Serve on ``host:port`` until the context ends; port 0 takes a free one, an empty address serves nothing.

    Gives the address, which is also written to ``port_file``.
    """
    if not address:
        yield ""
        return
    host, _, port = address.rpartition(":")
    connections = Connections()
    app.middlewares.insert(0, connections.note)
    runner = web.AppRunner(app, access_log=None, logger=_requests_log, shutdown_timeout=STOP_SECONDS)
    await runner.setup()
    watching = asyncio.create_task(connections.watch())
    server: asyncio.Server | None = None
    try:
        try:
            server = await asyncio.get_running_loop().create_server(
                connections.accept(runner.server), host.strip("[]"), int(port)
            )
        except (OSError, ValueError, OverflowError) as error:
            raise ServiceError(
                f"http = {address!r}: cannot listen there ({error}); write host:port, with a port that is free"
            ) from None
        found = f"{host}:{server.sockets[0].getsockname()[1]}"
        if port_file is not None:
            await asyncio.to_thread(write_atomic, port_file, found)
        log.info("HTTP on http://%s", found)
        yield found
    finally:
        watching.cancel()
        if server is not None:
            server.close()
        await runner.cleanup()


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        return _error(problem.status, str(problem))
    except web.HTTPNotFound:
        return _error(404, f"there is nothing at {request.path}: see docs/api.md for what there is")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return _error(405, f"{request.path} does not accept {request.method}: use {allowed}")
    except web.HTTPException as error:
        return _error(error.status, error.text or error.reason)
    except FedelError as error:
        return _error(503, str(error))
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _error(500, "the service failed to answer: see its log")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


async def _add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")


async def _end_followers(app: web.Application) -> None:
    for task in app[FOLLOWERS]:
        task.cancel()


def _exposition(registry: CollectorRegistry, zipped: bool) -> bytes:
    text = generate_latest(registry)
    return gzip.compress(text, compresslevel=1) if zipped else text
