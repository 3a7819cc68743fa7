"""Decides whether a connection is encrypted: always, except on the loopback without certificates."""

from __future__ import annotations

import argparse
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from fedel.errors import ConfigError
from fedel.security import secret
from fedel.security.folder import CRL

CERTS_VARIABLE = "FEDEL_CERTS"
"""Environment variable with the folder of a person's certificate, for the command line."""
PLAIN = "plain text: anyone who can reach the port can read models, take part as any client and stop runs"


@dataclass(frozen=True)
class Tls:
    """The ``[tls]`` section of every process."""

    dir: str = ""
    """Folder with ``ca.pem``, ``cert.pem`` and ``key.pem``; empty means plain text, on the loopback only."""
    crl: str = ""
    """Used by servers only: the list of revoked certificates; empty means ``crl.pem`` in ``dir``."""
    crl_from: str = ""
    """Used by servers only: ``host:port`` of the coordinator that signs certificates; the list is fetched there
    and kept in ``crl``. Empty: the file is only read."""
    crl_seconds: float = 60.0
    """How often the list is fetched."""
    insecure: bool = False
    """Use plain text although ``dir`` is set; only loopback addresses are allowed."""
    insecure_anywhere: bool = False
    """Use plain text with other machines too."""
    secret_file: str = ""
    """Plain text only: a file, readable by its owner only, with a secret that all processes of the federation
    send and servers require. Empty: the file that ``$FEDEL_SECRET_FILE`` names, if any."""

    def __post_init__(self) -> None:
        if self.crl_seconds <= 0:
            raise ValueError("tls.crl_seconds must be above 0")

    @classmethod
    def of_user(cls, certs: str = "") -> Tls:
        """The settings of a person at the command line."""
        return cls(dir=certs or os.environ.get(CERTS_VARIABLE, ""))

    @property
    def secure(self) -> bool:
        return bool(self.dir) and not self.insecure and not self.insecure_anywhere

    @property
    def folder(self) -> Path:
        return Path(self.dir)

    @property
    def crl_path(self) -> Path:
        return Path(self.crl) if self.crl else self.folder / CRL

    @property
    def _secret_path(self) -> str:
        return "" if self.secure else self.secret_file or os.environ.get(secret.VARIABLE, "")

    @property
    def secret(self) -> str:
        """What calls carry on connections in plain text; empty if there is none."""
        return secret.read(Path(self._secret_path)) if self._secret_path else ""

    def check(self, address: str) -> str:
        """How this address may be used, as text for the log; or an error that says what to do."""
        if self.secure:
            return f"mTLS with the certificate in {self.dir}"
        how = f"plain text with the secret in {self._secret_path}" if self._secret_path else PLAIN
        if self.insecure_anywhere:
            return f"{how}, from any machine, because insecure_anywhere says so"
        if is_loopback(address):
            return how if self._secret_path else f"{how}; on the loopback that means the users of this machine"
        raise ConfigError(
            f"{address} is not a loopback address, and without certificates everything would be {PLAIN}. Make "
            "certificates with `fedel certs` (docs/security.md, five commands) and set tls.dir, or force it "
            "with tls.insecure_anywhere = true (--insecure-anywhere)"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--insecure`` and ``--insecure-anywhere``: each overrides its key in the configuration."""
    parser.add_argument(
        "--insecure",
        dest="set",
        action="append_const",
        const="tls.insecure=true",
        help="plain text and no identities, on the loopback only",
    )
    parser.add_argument(
        "--insecure-anywhere",
        dest="set",
        action="append_const",
        const="tls.insecure_anywhere=true",
        help="plain text with any machine: anyone can read models and stop runs",
    )


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine can be at the other end.

    >>> [is_loopback(a) for a in ("127.0.0.1:7070", "localhost:7070", "[::1]:7070", "unix:/run/x")]
    [True, True, True, True]
    >>> [is_loopback(a) for a in ("0.0.0.0:7070", ":7070", "server:7070")]
    [False, False, False]
    """
    if address.startswith("unix:"):
        return True
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_of(address: str) -> str:
    """An address without its port.

    >>> host_of("[::1]:7070"), host_of("server:7070")
    ('::1', 'server')
    """
    host = address.removeprefix("dns:").removeprefix("ipv4:").removeprefix("ipv6:").lstrip("/")
    return host.rpartition(":")[0].strip("[]")
