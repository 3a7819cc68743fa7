"""One-time tokens: an operator makes one, a device exchanges it for its first certificate."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fedel.errors import CertificateError
from fedel.files import write_atomic
from fedel.security.folder import PRIVATE
from fedel.security.identity import Identity
from fedel.serialisation import parse_json

TOKENS = "tokens.json"


@dataclass(frozen=True)
class Grant:
    """The certificate that a token can be exchanged for."""

    identity: Identity
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Token:
    """What a device needs to enrol: its name, a secret, and the fingerprint of the server's authority.

    >>> Token.parse(str(Token("jetson 1", "s3cret", b"x" * 32))).name
    'jetson 1'
    """

    name: str
    secret: str
    fingerprint: bytes
    """SHA-256 of the authority's certificate."""

    def __str__(self) -> str:
        printed = base64.urlsafe_b64encode(self.fingerprint).decode().rstrip("=")
        return f"{quote(self.name, safe='')}:{self.secret}:{printed}"

    @classmethod
    def parse(cls, text: str) -> Token:
        name, _, rest = text.strip().partition(":")
        secret, _, printed = rest.partition(":")
        try:
            text.encode("ascii")
            fingerprint = base64.urlsafe_b64decode(printed + "=" * (-len(printed) % 4))
        except ValueError:
            fingerprint = b""
        if not name or not secret or len(fingerprint) != 32:
            raise CertificateError("this is not a complete token: copy all of what `fedel certs token` printed")
        return cls(unquote(name), secret, fingerprint)


class Tokens:
    """Unused tokens, by a digest of their secret. The caller holds the authority's lock."""

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self._path = folder / TOKENS
        self._fingerprint = fingerprint

    def create(self, grant: Grant, hours: float, now: datetime) -> Token:
        token = Token(grant.identity.name, secrets.token_urlsafe(16), self._fingerprint)
        entry = {
            "role": grant.identity.role,
            "name": grant.identity.name,
            "hosts": list(grant.hosts),
            "expires": (now + timedelta(hours=hours)).isoformat(),
        }
        self._save(self._load(now) | {_digest(token.secret): entry})
        return token

    def take(self, secret: str, now: datetime) -> Grant:
        """What the token grants. The token is deleted before the caller uses the result."""
        entries = self._load(now)
        entry = entries.pop(_digest(secret), None)
        if entry is None:
            raise CertificateError(
                "the token is unknown, used or expired: ask the operator for a new one (`fedel certs token`)"
            )
        self._save(entries)
        return _grant(entry)

    def drop(self, identity: Identity) -> None:
        entries = self._load(None)
        self._save({key: entry for key, entry in entries.items() if _grant(entry).identity != identity})

    def open(self, now: datetime) -> list[tuple[Grant, datetime]]:
        return [(_grant(e), datetime.fromisoformat(e["expires"])) for e in self._load(now).values()]

    def _load(self, now: datetime | None) -> dict[str, dict[str, Any]]:
        try:
            entries = parse_json(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
            return {
                key: entry
                for key, entry in entries.items()
                if _grant(entry) and (now is None or now < datetime.fromisoformat(entry["expires"]))
            }
        except (ValueError, KeyError, TypeError, AttributeError, CertificateError) as error:
            raise CertificateError(
                f"{self._path} is damaged ({error!r}): delete it and make new tokens with `fedel certs token`"
            ) from None

    def _save(self, entries: dict[str, dict[str, Any]]) -> None:
        write_atomic(self._path, json.dumps(entries, indent=1), mode=PRIVATE)


def _digest(secret: str) -> str:
    # The secret is random and long, so a plain digest is enough to hide it from readers of the file.
    return hashlib.sha256(secret.encode()).hexdigest()


def _grant(entry: dict[str, Any]) -> Grant:
    return Grant(Identity(entry["role"], entry["name"]), tuple(entry["hosts"]))
