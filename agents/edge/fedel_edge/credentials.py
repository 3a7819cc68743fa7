"""The key and certificate that systemd hands over (LoadCredential), and the renewed ones the agent keeps.

The key lies on the disk for root alone; the agent sees a copy in memory. A renewed certificate is no secret,
and goes to the agent's own folder with a link to that key beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedel.errors import CertificateError
from fedel.files import write_atomic
from fedel.security import certificates as x
from fedel.security.folder import CA, CERT, KEY, PUBLIC, Credentials, load
from fedel_edge.config import AgentConfig

VARIABLE = "CREDENTIALS_DIRECTORY"
"""Environment variable in which systemd tells the folder."""


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
    """The first certificate, or the one kept in the other folder if that is a later one of the same key."""
    own = load(first)
    try:
        ca, cert = (kept / CA).read_bytes(), (kept / CERT).read_bytes()
        renewed = x.certificates_from_pem(cert, str(kept / CERT))[0]
        fits = renewed.public_key() == x.key_from_pem(own.key, str(first / KEY)).public_key()
        facts = x.facts_of(renewed)
    except (OSError, CertificateError):
        return own  # nothing was renewed yet, or it was damaged: the agent renews again
    later = fits and facts.identity == own.facts.identity and facts.not_after > own.facts.not_after
    return Credentials(ca, cert, own.key, facts) if later else own
