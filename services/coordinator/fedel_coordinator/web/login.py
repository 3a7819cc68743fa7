"""The page's tokens: one for looking, one for control. Without the first, anyone may look."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler
from fedel_services.visitors import Problem

LOGIN = "/api/login"
COOKIE = "fedel_view"


class Login:
    """A browser exchanges the token for a cookie, because it cannot send a header with each request."""

    def __init__(self, view_token: str, control_token: str, files: Collection[str] = ()) -> None:
        """``files`` are the paths of the page itself: they hold no data and need no token."""
        self._open = {LOGIN, "/healthz", *files}
        self._view, self._control = view_token, control_token
        self._cookie = hmac.new(view_token.encode(), b"the page of FedEL", hashlib.sha256).hexdigest()

    @property
    def can_control(self) -> bool:
        return bool(self._control)

    @web.middleware
    async def check_view(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse to show anything without the token, if there is one."""
        if (
            self._view
            and not self._is_open(request)
            and not _same(request.cookies.get(COOKIE, ""), self._cookie)
        ):
            self._check(request, (self._view, self._control), 401, "http_view_token")
        return await handler(request)

    def _is_open(self, request: web.Request) -> bool:
        resource = request.match_info.route.resource
        return resource is None or resource.canonical in self._open

    async def answer(self, request: web.Request) -> web.Response:
        """``POST /api/login``"""
        if self._view:
            self._check(request, (self._view, self._control), 401, "http_view_token")
        response = web.json_response({})
        response.set_cookie(COOKIE, self._cookie, httponly=True, samesite="Strict")
        return response

    def check_control(self, request: web.Request) -> None:
        """The cookie is not enough: another page could make a browser send it."""
        if not self._control:
            raise Problem(
                403,
                "this page is read-only: set http_token, or FEDEL_HTTP_TOKEN, on the coordinator to control",
            )
        self._check(request, (self._control,), 403, "http_token")

    def _check(self, request: web.Request, tokens: tuple[str, ...], status: int, key: str) -> None:
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and any(token and _same(given, token) for token in tokens):
            return
        raise Problem(
            status,
            f"wrong or missing token: send 'Authorization: Bearer TOKEN', as in {key} of the coordinator",
        )


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())
