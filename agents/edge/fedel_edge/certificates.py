"""The agent's key and certificate: where they come from, whose they are, and renewing them before they expire.

systemd can hand them over (LoadCredential): then the key is on the disk for root only, and the agent sees a
copy in memory. A renewed certificate is not secret; it goes to the agent's own folder, with a link to the key.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fedel.errors import CertificateError, ServiceError
from fedel.files import write_atomic
from fedel.security import certificates as certs
from fedel.security.certificates import utc_now
from fedel.security.folder import CA, CERT, KEY, PUBLIC, Credentials, check_valid, load
from fedel.security.identity import AGENT
from fedel.wire.channel import Dialer
from fedel.wire.enrol import renew
from fedel_edge.config import AgentConfig

_log = logging.getLogger(__name__)
VARIABLE = "CREDENTIALS_DIRECTORY"
"""Environment variable in which systemd names the folder."""
_LOOK_SECONDS = (1.0, 60.0)
"""Shortest and longest time between two looks at the certificate."""


def adopt(config: AgentConfig, environment: Mapping[str, str] = os.environ) -> AgentConfig:
    """The configuration with the agent's own folder of certificates, if systemd hands over a key."""
    handed = Path(environment.get(VARIABLE, ""))
    if not (config.tls.secure and environment.get(VARIABLE) and _has_key(handed)):
        return config
    own = kept_folder(config)
    newest = latest(handed, own)
    own.mkdir(mode=0o700, parents=True, exist_ok=True)
    link = own / f".{KEY}.new"
    link.unlink(missing_ok=True)
    link.symlink_to(handed / KEY)
    link.replace(own / KEY)
    write_atomic(own / CA, newest.ca, mode=PUBLIC)
    write_atomic(own / CERT, newest.cert, mode=PUBLIC)
    return replace(config, tls=replace(config.tls, dir=str(own)))


def _has_key(handed: Path) -> bool:
    try:
        return (handed / KEY).exists()
    except PermissionError:
        raise CertificateError(
            f"{handed}: this user cannot read what systemd hands over; in a container its mounts must be "
            "shared for that: `mount --make-rshared /` before the service starts"
        ) from None


def kept_folder(config: AgentConfig) -> Path:
    return config.state_dir.absolute() / "certs"


def latest(first: Path, kept: Path) -> Credentials:
    """The first certificate, or the one in the other folder if that is a later one for the same key."""
    own = load(first)
    try:
        ca, cert = (kept / CA).read_bytes(), (kept / CERT).read_bytes()
        renewed = certs.certificates_from_pem(cert, str(kept / CERT))[0]
        fits = renewed.public_key() == certs.key_from_pem(own.key, str(first / KEY)).public_key()
        facts = certs.facts_of(renewed)
    except (OSError, CertificateError):
        return own  # nothing was renewed yet, or it was damaged: the agent renews again
    later = fits and facts.identity == own.facts.identity and facts.not_after > own.facts.not_after
    return Credentials(ca, cert, own.key, facts) if later else own


def with_certificate_name(config: AgentConfig, own: Credentials | None) -> AgentConfig:
    """The configuration with the name in the certificate."""
    if own is None:
        return config
    identity = own.facts.identity
    check_valid(own.facts, config.tls.dir, utc_now())
    if identity.role != AGENT or config.name not in ("", identity.name):
        raise CertificateError(
            f"{config.tls.dir} is the certificate of {identity}, not of agent '{config.client}': enrol with a "
            "token for this name, or leave `name` empty to use the certificate's"
        )
    return replace(config, name=identity.name)


async def keep_renewed(dialer: Dialer, coordinator: str, redial: Callable[[], None]) -> None:
    """Renew the certificate when two thirds of its time are over, and redial whenever there is a new one."""
    used, next_try = dialer.credentials, utc_now()
    while (own := dialer.credentials) is not None:
        now = utc_now()
        if own.facts.renewable(now) and now >= next_try:
            # Ten tries and more before it expires, but not a line in the log every minute.
            next_try = now + (own.facts.not_after - now) / 10
            await _renew(dialer, coordinator)
        if dialer.credentials is not used:
            used = dialer.credentials
            redial()
        least, most = _LOOK_SECONDS
        left = (own.facts.not_after - utc_now()).total_seconds()
        await asyncio.sleep(max(least, min(most, left / 10)))


async def _renew(dialer: Dialer, coordinator: str) -> None:
    try:
        own = await renew(dialer.channel(coordinator), dialer.tls.folder, coordinator)
    except (ServiceError, CertificateError, OSError) as error:
        _log.warning("the certificate in %s could not be renewed, will try again: %s", dialer.tls.dir, error)
    else:
        _log.info("renewed the certificate, until %s", own.facts.not_after.isoformat())
