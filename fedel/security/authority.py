"""The certificate authority of a federation: a folder with its key, its certificates and its tokens."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from fedel.errors import CertificateError
from fedel.files import write_atomic
from fedel.security import certificates as x
from fedel.security.certificates import Facts, utc_now
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

CA_KEY, ISSUED = "ca.key", "issued.jsonl"
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


class Authority:
    """Signs and revokes certificates. Several processes may use one folder: each change takes a lock."""

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
        with _locked(folder):
            if not (folder / CA_KEY).exists():
                now = utc_now()
                key, certificate = x.new_authority(name, days, now)
                write_atomic(folder / CA, x.to_pem(certificate), mode=PUBLIC)
                revoked = x.revocation_list(key, certificate, {}, now)
                write_atomic(folder / CRL, revoked, mode=PUBLIC)
                # Written last: if the key exists, the rest exists too.
                write_atomic(folder / CA_KEY, x.key_to_pem(key), mode=PRIVATE)
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
        return self._issue(x.key_of_request(request, where), identity, hosts, days)

    def renew(self, request: bytes, old: Facts) -> bytes:
        """A new certificate with the same identity, hosts and lifetime. The caller checks expiry."""
        if old.serial in self._revoked():
            raise CertificateError(
                f"the certificate of {old.identity} is revoked and cannot be renewed; enrol with a new token"
            )
        days = (old.lifetime.total_seconds() - x.SKEW.total_seconds()) / 86400
        return self.sign(request, old.identity, old.hosts, days)

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
        cert = self._issue(ensure_key(folder).public_key(), identity, hosts, days)
        return install(folder, x.to_pem(self.ca), cert)

    def _still_good(self, own: Credentials) -> bool:
        signed = x.signed_by(x.certificates_from_pem(own.cert, CERT)[0], [self.ca])
        return signed and own.facts.serial not in self._revoked() and not own.facts.renewable(utc_now())

    def revoke(self, identity: Identity) -> list[Issued]:
        """Revoke every valid certificate of the identity, and remove its unused tokens."""
        with _locked(self.folder):
            now, revoked = utc_now(), self._revoked()
            found = [i for i in self.issued() if (i.role, i.name) == (identity.role, identity.name)]
            chosen = [issued for issued in found if issued.status(now) == "valid"]
            revoked |= {int(issued.serial, 16): now for issued in chosen}
            revocations = x.revocation_list(self._key, self.ca, revoked, now)
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
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        revoked = self._revoked()
        found = []
        for line in lines:
            table = json.loads(line)
            when = revoked.get(int(table["serial"], 16))
            found.append(
                Issued(**table | {"hosts": tuple(table["hosts"])}, revoked=when.isoformat() if when else "")
            )
        return found

    def promise(self, identity: Identity, hosts: Sequence[str] = (), hours: float = 24.0) -> Token:
        """Make a one-time token for one certificate of this identity."""
        with _locked(self.folder):
            return self._tokens.create(Grant(identity, tuple(hosts)), hours, utc_now())

    def promises(self) -> list[tuple[Grant, datetime]]:
        """Unused tokens and when they expire."""
        return self._tokens.open(utc_now())

    def redeem(self, secret: str, request: bytes) -> tuple[Grant, bytes]:
        """Exchange the secret of a token for a certificate; the token cannot be used again."""
        key = x.key_of_request(request, "the enrolment request")
        with _locked(self.folder):
            grant = self._tokens.take(secret, utc_now())
        return grant, self._issue(key, grant.identity, grant.hosts, 0.0)

    def _issue(
        self, key: ec.EllipticCurvePublicKey, identity: Identity, hosts: Sequence[str], days: float
    ) -> bytes:
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
        with _locked(self.folder), (self.folder / ISSUED).open("a", encoding="utf-8") as file:
            file.write(json.dumps(table) + "\n")
        return x.to_pem(certificate) + x.to_pem(self.ca)

    def _revoked(self) -> dict[int, datetime]:
        path = self.folder / CRL
        return x.revoked_in(path.read_bytes(), [self.ca], str(path)) if path.exists() else {}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
