"""Who may call: the certificate of every call is checked, and its role looked up in the table of rules."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from grpc import aio
from prometheus_client import CollectorRegistry, Gauge

from fedel.errors import CertificateError
from fedel.security.certificates import Facts, facts_of_pem, utc_now
from fedel.security.folder import Revocations, Watched
from fedel.security.identity import RULES
from fedel.security.secret import HEADER, VARIABLE
from fedel.telemetry import AccessMetrics
from fedel_services.errors import refuse
from fedel_services.handlers import Behaviour, behaviour_of, with_behaviour
from fedel_services.rates import LimitedLog

log = logging.getLogger(__name__)

RECHECK_SECONDS = 5.0
"""A stream whose certificate expires or is revoked is ended within this time."""
_STATUS = {
    "certificate": grpc.StatusCode.UNAUTHENTICATED,
    "expired": grpc.StatusCode.UNAUTHENTICATED,
    "revoked": grpc.StatusCode.UNAUTHENTICATED,
    "token": grpc.StatusCode.UNAUTHENTICATED,
    "secret": grpc.StatusCode.UNAUTHENTICATED,
    "role": grpc.StatusCode.PERMISSION_DENIED,
    "client": grpc.StatusCode.PERMISSION_DENIED,
    "early": grpc.StatusCode.FAILED_PRECONDITION,
    "rate": grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Gatekeeper:
    """Ends calls that are not allowed, with a status, a line in the log, and a count."""

    def __init__(self, registry: CollectorRegistry, own: Watched | None) -> None:
        self._metrics = AccessMetrics(registry)
        self._lines = LimitedLog(log)
        if own is not None:
            expiry = self._metrics.certificate_expiry
            expiry.set_function(lambda: own.current().facts.not_after.timestamp())

    @property
    def list_fetched(self) -> Gauge:
        """When the revocation list was last fetched."""
        return self._metrics.list_fetched

    async def refuse(self, context: Any, reason: str, message: str, **about: Any) -> NoReturn:
        self._metrics.refused.labels(reason).inc()
        self._lines.write(
            logging.WARNING, f"refused: {message}", {"reason": reason, "peer": context.peer(), **about}
        )
        await refuse(context, _STATUS[reason], message, reason)


@dataclass(frozen=True)
class Caller:
    facts: Facts
    keeper: Gatekeeper


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""The caller of the current call; ``None`` on a connection in plain text."""


def caller() -> Caller | None:
    return _CALLER.get()


async def require_client(context: Any, client: str) -> None:
    """Refuse a call in the name of another client than the certificate's."""
    known = caller()
    if known is not None and known.facts.identity.name != client:
        message = f"the certificate belongs to {known.facts.identity}, which cannot speak for '{client}'"
        await known.keeper.refuse(context, "client", message, client=client)


class SecretGuard(aio.ServerInterceptor):
    """In plain text: answers only callers that send the federation's secret."""

    def __init__(self, keeper: Gatekeeper, secret: str) -> None:
        self._keeper, self._secret = keeper, secret.encode()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        sent = dict(details.invocation_metadata or ()).get(HEADER, "")
        known = hmac.compare_digest(sent if isinstance(sent, bytes) else sent.encode(), self._secret)
        if handler is None or known:
            return handler

        async def answer(_: Any, context: Any) -> None:
            message = f"the caller does not know the secret of this federation: name its file in ${VARIABLE}"
            await self._keeper.refuse(context, "secret", message, method=details.method)

        return with_behaviour(handler, answer)


class Guard(aio.ServerInterceptor):
    """Checks every call before it is answered; the handshake has verified who signed the certificate."""

    def __init__(self, keeper: Gatekeeper, revocations: Revocations) -> None:
        self._keeper = keeper
        self._revocations = revocations

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        guard = self._guard_stream if handler.response_streaming else self._guard_answer
        return with_behaviour(handler, guard(behaviour_of(handler), details.method))

    def _guard_answer(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def answer(request: Any, context: Any) -> Any:
            await self._admit(context, method)
            return await behaviour(request, context)

        return answer

    def _guard_stream(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def answer(request: Any, context: Any) -> None:
            facts = await self._admit(context, method)
            work = asyncio.ensure_future(behaviour(request, context))
            try:
                while not work.done():
                    await asyncio.wait({work}, timeout=RECHECK_SECONDS)
                    if not work.done():
                        await self._check(facts, context, method)
                work.result()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)  # or its error ends up in the log

        return answer

    async def _admit(self, context: Any, method: str) -> Facts:
        """The facts of the caller's certificate; refused if the caller may not make this call."""
        pem = context.auth_context().get("x509_pem_cert")
        try:
            facts = facts_of_pem(pem[0]) if pem else None
        except CertificateError as error:
            await self._keeper.refuse(context, "certificate", str(error), method=method)
        if facts is None:
            message = "the caller has no certificate: enrol it first"
            await self._keeper.refuse(context, "certificate", message, method=method)
        await self._check(facts, context, method)
        identity = facts.identity
        if identity.role not in RULES.get(method, ()):
            roles = " or ".join(sorted(RULES.get(method, ())))
            call = method.rpartition("/")[2]
            message = f"{identity} may not call {call}: that takes a certificate with the role {roles}"
            await self._keeper.refuse(context, "role", message, method=method, client=identity.name)
        _CALLER.set(Caller(facts, self._keeper))
        return facts

    async def _check(self, facts: Facts, context: Any, method: str) -> None:
        """Refuse a certificate that has expired or was revoked."""
        about = {"method": method, "client": facts.identity.name}
        if facts.serial in self._revocations:
            message = (
                f"the certificate of {facts.identity} is revoked: ask the operator for a new token; once it is"
                " enrolled again, an agent connects by itself within a minute"
            )
            await self._keeper.refuse(context, "revoked", message, **about)
        if utc_now() >= facts.not_after:
            message = f"the certificate of {facts.identity} has expired: renew it, or enrol again"
            await self._keeper.refuse(context, "expired", message, **about)
