"""The coordinator's JSON: runs, rounds, agents, a stream of changes, and actions that need the token."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from fedel_services.http import FOLLOWERS
from fedel_services.visitors import Problem, visitor

from fedel.errors import ServiceError
from fedel.roles.gate import clean
from fedel.selectors import Selector
from fedel.serialisation import parse_json, to_json
from fedel_coordinator.messages import MAX_WHY
from fedel_coordinator.web import views
from fedel_coordinator.web.events import Events
from fedel_coordinator.web.follow import Follower
from fedel_coordinator.web.login import LOGIN, Login
from fedel_coordinator.web.reader import Reader
from fedel_coordinator.web.rounds import MAX_ROUNDS

MAX_FOLLOWERS, MAX_OF_VISITOR = 100, 20
"""Watching must not slow down training; and one address cannot keep others from it."""
BY = "somebody at the live page"
"""The page knows a token and no names."""
MAX_AGENTS = 1000
"""In one answer."""
COMPRESS_BYTES = 16 * 1024
"""Longer answers are compressed, if the client accepts that."""


class Api:
    """Handlers of one coordinator."""

    def __init__(self, reader: Reader, events: Events, login: Login) -> None:
        self._reader, self._events, self._login = reader, events, login

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/api/runs", self.runs)
        app.router.add_get("/api/runs/{run}", self.run)
        app.router.add_get("/api/runs/{run}/rounds", self.rounds)
        app.router.add_get("/api/runs/{run}/events", self.follow)
        app.router.add_post("/api/runs/{run}/{action:pause|resume|stop|stop_now}", self.control)
        app.router.add_get("/api/agents", self.agents)
        app.router.add_get("/api/agents/{agent}", self.agent)
        app.router.add_post(LOGIN, self._login.answer)

    async def runs(self, _request: web.Request) -> web.Response:
        found = [views.summary(run.view()) for run in await self._reader.all()]
        return _json({"runs": found, "can_control": self._login.can_control, "now": self._reader.now()})

    async def run(self, request: web.Request) -> web.Response:
        run = await self._reader.find(request.match_info["run"])
        clients = await self._reader.clients(run)
        return _json(
            self._reader.head(run) | views.setting(run.view(), run.spec) | {"clients": list(clients.values())}
        )

    async def rounds(self, request: web.Request) -> web.Response:
        run = await self._reader.find(request.match_info["run"])
        since = _number(request, "since", 0)
        limit = min(MAX_ROUNDS, max(1, _number(request, "limit", MAX_ROUNDS)))
        if client := request.query.get("client", ""):
            found = await self._reader.rounds.of_client(run, client, since, limit)
        elif request.query.get("full") == "1":
            found = await self._reader.rounds.full(run, since, limit)
        else:
            found = await self._reader.rounds.brief(run, since, limit)
        return _json({"rounds": found, "next": found[-1]["round"] + 1 if found else since})

    async def agents(self, request: web.Request) -> web.Response:
        limit = min(MAX_AGENTS, max(1, _number(request, "limit", MAX_AGENTS)))
        try:
            selector = Selector.parse(request.query.get("selector", ""))
        except ValueError as error:
            raise Problem(400, f"selector: {error}") from None
        found, more = self._reader.agents(selector, request.query.get("after", ""), limit)
        return _json({"agents": found, "next": found[-1].name if more else None, "now": self._reader.now()})

    async def agent(self, request: web.Request) -> web.Response:
        return _json(self._reader.agent(request.match_info["agent"]))

    async def follow(self, request: web.Request) -> web.StreamResponse:
        run = await self._reader.find(request.match_info["run"])
        since = _number(request, "since", 0, request.headers.get("Last-Event-ID", ""))
        followers, address = request.app[FOLLOWERS], visitor(request)
        if len(followers) >= MAX_FOLLOWERS or list(followers.values()).count(address) >= MAX_OF_VISITOR:
            raise Problem(
                503,
                f"{len(followers)} pages follow already; {MAX_FOLLOWERS} may, {MAX_OF_VISITOR} of one address: "
                "close one, or read /api/runs/NAME",
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        task = asyncio.current_task()
        assert task is not None
        followers[task] = address
        try:
            await response.prepare(request)
            await Follower(self._reader, self._events, response, since).follow(run)
        except ConnectionError:
            pass  # the listener has gone
        finally:
            del followers[task]
        return response

    async def control(self, request: web.Request) -> web.Response:
        self._login.check_control(request)
        run, action = await self._reader.find(request.match_info["run"]), request.match_info["action"]
        why = await _why(request)
        try:
            await run.control(action, BY, why)
        except ServiceError as error:
            raise Problem(409, str(error)) from None
        return _json(self._reader.head(run))


async def _why(request: web.Request) -> str:
    """What a person says about a pause or a stop: the field of a JSON object, if there is one."""
    text = await request.text()
    try:
        told = parse_json(text) if text else {}
    except ValueError:
        told = None
    why = told.get("why", "") if isinstance(told, dict) else None
    if not isinstance(why, str):
        raise Problem(400, 'the body is not {"why": "TEXT"}: send that, or no body')
    return clean(why, MAX_WHY)


def _number(request: web.Request, key: str, default: int, preferred: str = "") -> int:
    text = preferred or request.query.get(key, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Problem(400, f"{key} = {text!r} is not a whole number: write {key}=0 or more")
    return int(text)


def _json(data: Any) -> web.Response:
    response = web.Response(text=to_json(data), content_type="application/json")
    if len(response.body) > COMPRESS_BYTES:  # type: ignore[arg-type]
        response.enable_compression()
    return response
