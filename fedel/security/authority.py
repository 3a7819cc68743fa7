"""The certificate authority of a federation: a folder with its key, its certificates and its tokens."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from fedel.errors import CertificateError
from fedel.files import write_atomic
from fedel.security import certificates as x
from fedel.security.certificates import Facts, RevocationList, utc_now
from fedel.security.folder import (
    CA,
    CERT,
    CRL,
    PRIVATE,
    PUBLIC,
    Credentials,
    ensure_key,
    install,
    load,
)
from fedel.security.identity import AGENT, SERVICE, Identity
from fedel.security.tokens import Grant, Token, Tokens
from fedel.serialisation import parse_json

CA_KEY, ISSUED, BARRED = "ca.key", "issued.jsonl", "barred.json"
CA_DAYS = 3650.0
DAYS = {AGENT: 30.0, SERVICE: 90.0}
OTHER_DAYS = 30.0
"""The roles of people."""


@dataclass(frozen=True)
class Issued:
    """One line of ``issued.jsonl``."""

    serial: str
    """Hexadecimal."""
    role: str
    name: str
    hosts: tuple[str, ...]
    not_after: str
    """ISO 8601, UTC."""
    revoked: str = ""
    """When it was revoked, if it was. Read from the revocation list, not stored in this line."""

    def status(self, now: datetime) -> str:
        if self.revoked:
            return "revoked"
        return "valid" if now < datetime.fromisoformat(self.not_after) else "expired"


class EarlyRenewal(CertificateError):
    """More than a third of the certificate's time is left."""


class Authority:
    """Signs and revokes certificates. Several processes may use one folder: each change takes a lock.

    Under the lock it is looked up whether an identity is revoked, and the certificate is signed and recorded.
    So a certificate is either on record when its identity is revoked, or refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / CA_KEY).exists():
            raise CertificateError(
                f"{folder} has no certificate authority; make one with `fedel certs init --authority {folder}`"
            )
        self._key = x.key_from_pem((folder / CA_KEY).read_bytes(), str(folder / CA_KEY))
        self.ca = x.certificates_from_pem((folder / CA).read_bytes(), str(folder / CA))[0]
        self._tokens = Tokens(folder, x.fingerprint(self.ca))

    @classmethod
    def create(cls, folder: Path, name: str = "FedEL", days: float = CA_DAYS) -> Authority:
        """Make a new authority, or return the one that exists."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder):
            if not (folder / CA_KEY).exists():
                now = utc_now()
                key, certificate = x.new_authority(name, days, now)
                write_atomic(folder / CA, x.to_pem(certificate), mode=PUBLIC)
                revoked = x.revocation_list(key, certificate, 1, {}, now)
                write_atomic(folder / CRL, revoked, mode=PUBLIC)
                # Written last: if the key exists, the rest exists too.
                write_atomic(folder / CA_KEY, x.key_to_pem(key), mode=PRIVATE)
        return cls(folder)

    @classmethod
    def adopt(cls, folder: Path, source: Path) -> Authority:
        """Use your own authority: ``tls.crt`` and ``tls.key`` in ``source``, as a Kubernetes secret has them.

        The key stays there: this folder, and every backup of it, has only a link to it.
        """
        key_path, pem = source / "tls.key", _given(source / "tls.crt")
        key = x.key_from_pem(_given(key_path), str(key_path))
        ca = x.certificates_from_pem(pem, str(source / "tls.crt"))[0]
        if key.public_key() != ca.public_key() or not x.is_authority(ca):
            raise CertificateError(
                f"{source}: tls.crt must be a certificate authority that signed itself, and tls.key its key"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(folder):
            known = folder / CA
            if known.exists() and x.certificates_from_pem(known.read_bytes(), str(known))[0].public_key() != (
                ca.public_key()
            ):
                raise CertificateError(f"{folder} has another authority already: choose another folder")
            if not (folder / CRL).exists():
                write_atomic(folder / CRL, x.revocation_list(key, ca, 1, {}, utc_now()), mode=PUBLIC)
            write_atomic(known, x.to_pem(ca), mode=PUBLIC)
            if not (folder / CA_KEY).exists():
                (folder / CA_KEY).unlink(missing_ok=True)  # a link to a key that has moved
                (folder / CA_KEY).symlink_to(key_path.absolute())
        return cls(folder)

    def sign(
        self,
        request: bytes,
        identity: Identity,
        hosts: Sequence[str] = (),
        days: float = 0.0,
        where: str = "CSR",
    ) -> bytes:
        """A certificate for the request's key, followed by the authority's; 0 days: the role's default."""
        key = x.key_of_request(request, where)
        with locked(self.folder):
            return self._issue_and_unbar(key, identity, hosts, days)

    def renew(self, request: bytes, old: Facts, early: bool = False) -> bytes:
        """A new certificate with the same identity, hosts and lifetime. The caller checks expiry.

        Once an identity is revoked, none of its certificates can be renewed, until it gets one in another way.
        """
        key = x.key_of_request(request, "the signing request")
        if not early and not old.renewable(utc_now()):
            due = old.not_after - old.lifetime / 3
            raise EarlyRenewal(
                f"the certificate of {old.identity} can be renewed when two thirds of its time have passed: "
                f"from {due:%Y-%m-%d %H:%M} UTC on"
            )
        days = (old.lifetime.total_seconds() - x.SKEW.total_seconds()) / 86400
        with locked(self.folder):
            if old.identity.uri in self._barred() or old.serial in self._revoked():
                raise CertificateError(
                    f"the certificate of {old.identity} is revoked and cannot be renewed: enrol with a token"
                )
            return self._issue(key, old.identity, old.hosts, days)

    def issue(
        self, folder: Path, identity: Identity, hosts: Sequence[str] = (), days: float = 0.0
    ) -> Credentials:
        """Write key, certificate and authority into a folder; a certificate that is still valid is kept."""
        if (folder / CERT).exists():
            found = load(folder)
            if found.facts.identity != identity:
                raise CertificateError(f"{folder} belongs to {found.facts.identity}: choose another folder")
            if self._still_good(found) and set(hosts) == set(found.facts.hosts):
                return found
        key = ensure_key(folder).public_key()
        with locked(self.folder):
            cert = self._issue_and_unbar(key, identity, hosts, days)
        return install(folder, x.to_pem(self.ca), cert)

    def _still_good(self, own: Credentials) -> bool:
        signed = x.signed_by(x.certificates_from_pem(own.cert, CERT)[0], [self.ca])
        return signed and own.facts.serial not in self._revoked() and not own.facts.renewable(utc_now())

    def revoke(self, identity: Identity) -> list[Issued]:
        """Revoke every valid certificate of the identity, bar it from renewing, remove its unused tokens."""
        with locked(self.folder):
            self._bar(self._barred() | {identity.uri})
            now, last = utc_now(), self._list()
            found = [i for i in self.issued() if (i.role, i.name) == (identity.role, identity.name)]
            chosen = [issued for issued in found if issued.status(now) == "valid"]
            revoked = {**last.revoked, **{int(issued.serial, 16): now for issued in chosen}}
            # By the clock, so that the next list of an authority that was restored from a backup is newer too.
            number = max(last.number + 1, int(now.timestamp() * 1000))
            revocations = x.revocation_list(self._key, self.ca, number, revoked, now)
            write_atomic(self.folder / CRL, revocations, mode=PUBLIC)
            self._tokens.drop(identity)
        if not found:
            raise CertificateError(
                f"{self.folder} never issued a certificate to {identity}; see `fedel certs list`"
            )
        return chosen

    def issued(self) -> list[Issued]:
        """Every certificate, oldest first."""
        path = self.folder / ISSUED
        lines = path.read_bytes().splitlines() if path.exists() else []
        revoked = self._revoked()
        return [_issued(line, revoked, f"{path}, line {number}") for number, line in enumerate(lines, 1)]

    def signed_list(self) -> bytes:
        """The revocation list in PEM format; the servers check its signature."""
        return (self.folder / CRL).read_bytes()

    def promise(self, identity: Identity, hosts: Sequence[str] = (), hours: float = 24.0) -> Token:
        """Make a one-time token for one certificate of this identity."""
        with locked(self.folder):
            return self._tokens.create(Grant(identity, tuple(hosts)), hours, utc_now())

    def promises(self) -> list[tuple[Grant, datetime]]:
        """Unused tokens and when they expire."""
        return self._tokens.open(utc_now())

    def redeem(self, secret: str, request: bytes) -> tuple[Grant, bytes]:
        """Exchange the secret of a token for a certificate; the token cannot be used again."""
        key = x.key_of_request(request, "the enrolment request")
        with locked(self.folder):
            grant = self._tokens.take(secret, utc_now())
            return grant, self._issue_and_unbar(key, grant.identity, grant.hosts, 0.0)

    def _issue_and_unbar(
        self, key: ec.EllipticCurvePublicKey, identity: Identity, hosts: Sequence[str], days: float
    ) -> bytes:
        """Somebody with the authority or a token asked for it: from now on the identity may renew again."""
        cert = self._issue(key, identity, hosts, days)
        barred = self._barred()
        if identity.uri in barred:
            self._bar(barred - {identity.uri})
        return cert

    def _issue(
        self, key: ec.EllipticCurvePublicKey, identity: Identity, hosts: Sequence[str], days: float
    ) -> bytes:
        """The caller holds the lock. The certificate is on record, on disk, before anyone gets it."""
        days = days or DAYS.get(identity.role, OTHER_DAYS)
        certificate = x.sign(self._key, self.ca, key, identity, hosts, days, utc_now())
        line = Issued(
            serial=f"{certificate.serial_number:x}",
            role=identity.role,
            name=identity.name,
            hosts=tuple(hosts),
            not_after=certificate.not_valid_after_utc.isoformat(),
        )
        table = asdict(line)
        del table["revoked"]
        with (self.folder / ISSUED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(table) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return x.to_pem(certificate) + x.to_pem(self.ca)

    def _list(self) -> RevocationList:
        path = self.folder / CRL
        if not path.exists():
            return RevocationList(b"", 0, {})
        return x.read_revocation_list(path.read_bytes(), [self.ca], str(path))

    def _revoked(self) -> Mapping[int, datetime]:
        return self._list().revoked

    def _barred(self) -> frozenset[str]:
        """Identities that were revoked and got no certificate since."""
        path = self.folder / BARRED
        try:
            return frozenset(map(str, parse_json(path.read_bytes()))) if path.exists() else frozenset()
        except (ValueError, TypeError) as error:
            raise CertificateError(
                f"{path} is damaged ({error}): delete it, then revoke again those who must not renew"
            ) from None

    def _bar(self, identities: frozenset[str]) -> None:
        write_atomic(self.folder / BARRED, json.dumps(sorted(identities), indent=1), mode=PRIVATE)


def _issued(line: bytes, revoked: Mapping[int, datetime], where: str) -> Issued:
    try:
        table = parse_json(line)
        when = revoked.get(int(table["serial"], 16))
        found = Issued(**table | {"hosts": tuple(table["hosts"])}, revoked=when.isoformat() if when else "")
        found.status(utc_now())
    except (ValueError, KeyError, TypeError) as error:
        raise CertificateError(f"{where} is damaged ({error!r}): mend or delete the line") from None
    return found


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _given(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path}: {error.strerror}; name a folder with tls.crt and tls.key") from None
