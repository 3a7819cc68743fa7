"""The agent's certificate: whose it is, and renewing it before it expires."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from fedel.errors import CertificateError, ServiceError
from fedel.security.certificates import utc_now
from fedel.security.folder import Credentials, check_valid
from fedel.security.identity import AGENT
from fedel.wire.channel import Dialer
from fedel.wire.enrol import renew
from fedel_edge.config import AgentConfig

_log = logging.getLogger(__name__)
_LOOK_SECONDS = (1.0, 60.0)
"""Least and most between two looks at the certificate."""


def named(config: AgentConfig, own: Credentials | None) -> AgentConfig:
    """The configuration with the name that the certificate gives."""
    if own is None:
        return config
    identity = own.facts.identity
    check_valid(own.facts, config.tls.dir, utc_now())
    if identity.role != AGENT or config.name not in ("", identity.name):
        raise CertificateError(
            f"{config.tls.dir} is the certificate of {identity}, not of agent '{config.client}': enrol with a "
            "token for this name, or leave `name` empty to take the certificate's"
        )
    return replace(config, name=identity.name)


async def keep_fresh(dialer: Dialer, coordinator: str, redial: Callable[[], None]) -> None:
    """Renew the certificate when two thirds of its time are over, and redial whenever there is a new one."""
    shown, next_try = dialer.credentials, utc_now()
    while (own := dialer.credentials) is not None:
        now = utc_now()
        if own.facts.renewable(now) and now >= next_try:
            # Ten tries and more before it expires, but not a line in the log every minute.
            next_try = now + (own.facts.not_after - now) / 10
            await _renew(dialer, coordinator)
        if dialer.credentials is not shown:
            shown = dialer.credentials
            redial()
        least, most = _LOOK_SECONDS
        left = (own.facts.not_after - utc_now()).total_seconds()
        await asyncio.sleep(max(least, min(most, left / 10)))


async def _renew(dialer: Dialer, coordinator: str) -> None:
    try:
        own = await renew(dialer.channel(coordinator), dialer.tls.folder, coordinator)
    except (ServiceError, CertificateError, OSError) as error:
        _log.warning("the certificate in %s is not renewed yet: %s", dialer.tls.dir, error)
    else:
        _log.info("renewed the certificate, until %s", own.facts.not_after.isoformat())
