"""The folder with the key and certificate of a process; its files are read again when they change."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from fedel.errors import CertificateError
from fedel.files import write_atomic
from fedel.security import certificates as x
from fedel.security.certificates import Facts

log = logging.getLogger(__name__)

CA, CERT, KEY, CRL, REQUEST = "ca.pem", "cert.pem", "key.pem", "crl.pem", "request.pem"
PUBLIC, PRIVATE = 0o644, 0o600
"""Modes of files that others may read, and of keys and tokens."""
Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Credentials:
    """Key and certificates of a TLS endpoint in PEM format, and the content of its certificate."""

    ca: bytes
    cert: bytes
    """The certificate, then the authority's: a device that enrols reads the authority from the handshake."""
    key: bytes
    facts: Facts


def load(folder: Path) -> Credentials:
    """Read the folder's files and check that they belong together; expiry is not checked."""
    ca, cert, key = (_read(folder / name) for name in (CA, CERT, KEY))
    return _fitting(folder, ca, cert, key)


def install(folder: Path, ca: bytes, cert: bytes) -> Credentials:
    """Store a signed certificate next to the folder's key, if it is for that key."""
    own = _fitting(folder, ca, cert, _read(folder / KEY))
    write_atomic(folder / CA, ca, mode=PUBLIC)
    write_atomic(folder / CERT, cert, mode=PUBLIC)
    return own


def _fitting(folder: Path, ca: bytes, cert: bytes, key: bytes) -> Credentials:
    authorities = x.certificates_from_pem(ca, str(folder / CA))
    own = x.certificates_from_pem(cert, str(folder / CERT))[0]
    if x.key_from_pem(key, str(folder / KEY)).public_key() != own.public_key():
        raise CertificateError(f"{folder}: {KEY} does not belong to {CERT}; get a new certificate signed")
    if not x.signed_by(own, authorities):
        raise CertificateError(
            f"{folder}: {CERT} is not signed by the authority in {CA}; copy both from the same place"
        )
    try:
        return Credentials(ca, cert, key, x.facts_of(own))
    except CertificateError as error:
        raise CertificateError(f"{folder / CERT}: {error}") from None


def ensure_key(folder: Path) -> x.PrivateKey:
    """The folder's key; made here if there is none. It never leaves the folder."""
    path = folder / KEY
    if not path.exists():
        write_atomic(path, x.key_to_pem(x.new_key()), mode=PRIVATE)
    return x.key_from_pem(path.read_bytes(), str(path))


def check_valid(facts: Facts, where: str, now: datetime) -> None:
    if now >= facts.not_after:
        raise CertificateError(
            f"{where}: the certificate of {facts.identity} expired on {facts.not_after:%Y-%m-%d %H:%M} UTC; "
            "enrol again with a new token, or run `fedel certs renew` where the authority is"
        )
    if now < facts.not_before:
        raise CertificateError(
            f"{where}: the certificate of {facts.identity} is not valid before "
            f"{facts.not_before:%Y-%m-%d %H:%M} UTC; is the clock of this machine right?"
        )


class Watched:
    """The current credentials of a folder; while its files do not match, the previous ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stamp = stamp_of(*(folder / name for name in (CA, CERT, KEY)))
        self._loaded = load(folder)

    def current(self) -> Credentials:
        stamp = stamp_of(*(self.folder / name for name in (CA, CERT, KEY)))
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._loaded = load(self.folder)
            except CertificateError as error:
                log.error("keeping the old certificate: %s", error)
            else:
                facts = self._loaded.facts
                log.info("new certificate for %s, valid until %s", facts.identity, facts.not_after.isoformat())
        return self._loaded


class Revocations:
    """The newest revocation list of each authority. Nothing un-revokes a certificate while a process runs.

    A missing file changes nothing; a damaged, foreign or older one is not used.
    """

    def __init__(self, path: Path, credentials: Watched) -> None:
        self._path = path
        self._credentials = credentials
        self._stamp: Stamp = ()
        self._lists: dict[bytes, x.RevocationList] = {}
        self._revoked: set[int] = set()

    def __contains__(self, serial: object) -> bool:
        self._refresh()
        return serial in self._revoked

    def newest(self) -> bytes:
        """The list as it is on disk, for others; empty if there is none that is sound."""
        self._refresh()
        try:
            return self._path.read_bytes() if self._lists else b""
        except OSError:
            return b""

    def install(self, pem: bytes, where: str) -> bool:
        """Take over a list that came over the network, and keep it on disk; whether it was new."""
        self._refresh()
        found = self._checked(pem, where)
        held = self._lists.get(found.authority)
        if held is not None and held.number == found.number and self._path.exists():
            return False
        write_atomic(self._path, pem, mode=PUBLIC)
        self._refresh()
        return True

    def _refresh(self) -> None:
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            found = self._checked(self._path.read_bytes(), str(self._path))
        except FileNotFoundError:
            log.info("no revocation list at %s: %d certificates remain revoked", self._path, len(self._revoked))
        except (OSError, CertificateError) as error:
            log.error("keeping the old revocation list: %s", error)
        else:
            self._lists[found.authority] = found
            self._revoked |= found.revoked.keys()
            log.info("new revocation list with %d certificates", len(found.revoked))

    def _checked(self, pem: bytes, where: str) -> x.RevocationList:
        authorities = x.certificates_from_pem(self._credentials.current().ca, CA)
        found = x.read_revocation_list(pem, authorities, where)
        held = self._lists.get(found.authority)
        if held is not None and found.number < held.number:
            raise CertificateError(
                f"{where}: list {found.number} is older than list {held.number}, which is in use; "
                "copy the newest crl.pem of the authority"
            )
        return found


def stamp_of(*paths: Path) -> Stamp:
    """A value that changes when one of the files is replaced."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except FileNotFoundError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise CertificateError(
            f"{path} is missing; make it with `fedel certs issue` or `fedel certs enrol`, see docs/security.md"
        ) from None
    except OSError as error:
        raise CertificateError(
            f"{path} cannot be read: {error.strerror}; check its owner and permissions"
        ) from None
