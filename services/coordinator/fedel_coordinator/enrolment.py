"""EnrolmentService: signs certificates with the federation's authority."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from fedel_services.errors import ErrorStatuses, refuse
from fedel_services.guard import Caller, Gatekeeper, caller
from fedel_services.rates import Rates, peer_host
from fedel_services.runtime import GRACE_SECONDS, Server
from grpc import aio

from fedel.errors import CertificateError, ConfigError, ServiceError
from fedel.files import write_atomic
from fedel.security.authority import Authority, EarlyRenewal
from fedel.security.certificates import key_of_request
from fedel.security.folder import Watched
from fedel.security.tls import Tls
from fedel.v1 import enrolment_pb2 as pb
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceServicer, add_EnrolmentServiceServicer_to_server
from fedel.wire.channel import SERVER_OPTIONS, server_credentials
from fedel_coordinator.config import EnrolmentConfig

log = logging.getLogger(__name__)


ENROL_BURST, ENROL_SECONDS = 30, 1.0
"""Enrolments from one address: this many at once, then one after each such time."""
RENEW_BURST, RENEW_SECONDS = 10, 60.0
"""Renewals of one identity."""
ENROLMENT_OPTIONS = [
    *SERVER_OPTIONS,
    # Anyone may connect here: a call is short, its message small, and nobody needs to stay.
    ("grpc.max_receive_message_length", 64 * 1024),
    ("grpc.max_connection_age_ms", 60_000),
    ("grpc.max_connection_age_grace_ms", 20_000),
]


class Enrolment(EnrolmentServiceServicer):
    def __init__(self, authority: Authority, keeper: Gatekeeper) -> None:
        self._authority = authority
        self._keeper = keeper
        self._enrolments = Rates(ENROL_BURST, ENROL_SECONDS)
        self._renewals = Rates(RENEW_BURST, RENEW_SECONDS)

    async def Enrol(self, request: pb.EnrolRequest, context: Any) -> pb.EnrolResponse:
        if not self._enrolments.allow(peer_host(context.peer())):
            message = "too many enrolments from this address: wait a minute, then try again"
            await self._keeper.refuse(context, "rate", message)
        await _check_request(request.signing_request, context)
        try:
            grant, certificates = await asyncio.to_thread(
                self._authority.redeem, request.secret, request.signing_request
            )
        except CertificateError as error:
            await self._keeper.refuse(context, "token", str(error))
        log.info("enrolled %s from %s", grant.identity, context.peer(), extra={"client": grant.identity.name})
        return pb.EnrolResponse(certificates=certificates)

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        now = await self._known(context)
        identity = now.facts.identity
        about = {"client": identity.name}
        if not self._renewals.allow(identity.uri):
            message = f"too many renewals of {identity}: wait some minutes, then try again"
            await self._keeper.refuse(context, "rate", message, **about)
        await _check_request(request.signing_request, context)
        try:
            certificates = await asyncio.to_thread(self._authority.renew, request.signing_request, now.facts)
        except EarlyRenewal as error:
            await self._keeper.refuse(context, "early", str(error), **about)
        except CertificateError as error:
            await self._keeper.refuse(context, "revoked", str(error), **about)
        log.info("renewed the certificate of %s", identity, extra=about)
        return pb.RenewResponse(certificates=certificates)

    async def GetRevocationList(
        self,
        request: pb.GetRevocationListRequest,  # noqa: ARG002
        context: Any,
    ) -> pb.GetRevocationListResponse:
        await self._known(context)
        found = await asyncio.to_thread(self._authority.signed_list)
        return pb.GetRevocationListResponse(revocation_list=found)

    async def _known(self, context: Any) -> Caller:
        """The enrolment port is for ``Enrol`` alone: its callers have no certificate."""
        now = caller()
        if now is None:
            await self._keeper.refuse(context, "certificate", "this call needs a certificate: enrol first")
        return now


@asynccontextmanager
async def serve_enrolment(config: EnrolmentConfig, tls: Tls, server: Server) -> AsyncIterator[None]:
    """Renew on the coordinator's own port, and enrol on another: there, callers have no certificate yet.

    Another server, too: nothing else of the coordinator can be reached there.
    """
    if not config.authority:
        yield
        return
    if not tls.secure:
        raise ConfigError(
            "enrolment.authority without tls.dir: a coordinator that signs needs a certificate itself"
        )
    servicer = Enrolment(await asyncio.to_thread(Authority, Path(config.authority)), server.keeper)
    add_EnrolmentServiceServicer_to_server(servicer, server.grpc)
    if not config.listen:
        yield
        return
    other = aio.server(interceptors=[ErrorStatuses()], options=ENROLMENT_OPTIONS)
    add_EnrolmentServiceServicer_to_server(servicer, other)
    try:
        address = f"{config.listen.rpartition(':')[0]}:{await _listen(other, config.listen, tls)}"
        if config.port_file is not None:
            await asyncio.to_thread(write_atomic, config.port_file, address)
        log.info("devices enrol on %s", address)
        yield
    finally:
        await other.stop(GRACE_SECONDS)


async def _listen(server: aio.Server, address: str, tls: Tls) -> int:
    credentials = server_credentials(Watched(tls.folder), client_certificates=False)
    try:
        port: int = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ServiceError(f"cannot listen on {address}: is another process using the port?") from None
    await server.start()
    return port


async def _check_request(pem: bytes, context: Any) -> None:
    try:
        key_of_request(pem, "the signing request")
    except CertificateError as error:
        await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error), "request")
