"""Fetching the authority's list of revoked certificates, for servers that cannot read its folder."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
from grpc import aio
from prometheus_client import Gauge

from fedel.errors import FedelError
from fedel.security.folder import Revocations
from fedel.security.tls import Tls
from fedel.v1 import enrolment_pb2 as pb
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from fedel.wire.channel import Dialer

log = logging.getLogger(__name__)
CALL_SECONDS = 20.0
LONG = 10
"""After this many failures in a row, and again after as many more, the log has an error."""


class Fetcher:
    """Asks the coordinator again and again; what it gets counts only with the authority's signature."""

    def __init__(self, tls: Tls, revocations: Revocations, fetched: Gauge) -> None:
        self._tls = tls
        self._revocations = revocations
        self._fetched = fetched
        self._failures = 0
        self._since = time.monotonic()

    async def run(self) -> None:
        """Until it is cancelled."""
        dialer = Dialer(self._tls, near=True)
        try:
            while True:
                await self._try(dialer)
                await asyncio.sleep(self._tls.crl_seconds)
        finally:
            await dialer.close()

    async def _try(self, dialer: Dialer) -> None:
        source = self._tls.crl_from
        try:
            stub = EnrolmentServiceStub(dialer.channel(source))
            answer = await stub.GetRevocationList(pb.GetRevocationListRequest(), timeout=CALL_SECONDS)
            self._revocations.install(answer.revocation_list, f"the list of {source}")
        except aio.AioRpcError as error:
            unserved = error.code() is grpc.StatusCode.UNIMPLEMENTED
            self._failed("set enrolment.authority on that coordinator" if unserved else str(error.details()))
        except (FedelError, OSError) as error:
            self._failed(str(error))
        else:
            if self._failures:
                log.info("the revocation list is fetched from %s again", source)
            self._failures, self._since = 0, time.monotonic()
            self._fetched.set_to_current_time()

    def _failed(self, why: str) -> None:
        self._failures += 1
        about = (self._tls.crl_from, time.monotonic() - self._since, why)
        if self._failures % LONG == 0:
            log.error(
                "no revocation list from %s for %.0f s (%s): certificates that were revoked since then still "
                "get in here. Check tls.crl_from, or copy the authority's crl.pem",
                *about,
            )
        elif self._failures == 1:
            log.warning("no revocation list from %s for %.0f s (%s); will try again", *about)
