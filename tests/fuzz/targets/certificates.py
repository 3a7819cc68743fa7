"""Certificates, keys, requests, revocation lists and tokens."""

from __future__ import annotations

import base64
import shutil
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

from fedel import bundle
from fedel.bundle import Bundle
from fedel.errors import FedelError
from fedel.security import certificates as x
from fedel.security import signed_code
from fedel.security.authority import Authority
from fedel.security.folder import load
from fedel.security.identity import Identity
from fedel.security.tokens import Token
from fedel.v1.code_pb2 import StoredCode
from fedel.wire import code as wire_code
from tests.fuzz.mutate import STRINGS, json_case, message_case, mutate_bytes
from tests.fuzz.target import Mutator, Read, Target, parsed, scratch


@cache
def _authority() -> Authority:
    authority = Authority.create(scratch() / "ca")
    folder = authority.folder.parent / "server"
    authority.issue(folder, Identity("service", "server"), ("127.0.0.1", "localhost"))
    authority.issue(authority.folder.parent / "old", Identity("agent", "jetson 1"))
    authority.promise(Identity("agent", "jetson 2"))
    authority.revoke(Identity("agent", "jetson 1"))
    return authority


def _file(name: str) -> bytes:
    return (_authority().folder.parent / name).read_bytes()


def pem_case(rng: Random, valid: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Change what stands between the lines that begin and end it, or the text itself."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, valid, others)
    try:
        begin, *body = valid.decode().split("-----END")[0].strip().splitlines()
        inner = mutate_bytes(rng, base64.b64decode("".join(body)))
    except ValueError:
        return mutate_bytes(rng, valid, others)
    text = "\n".join(textwrap.wrap(base64.b64encode(inner).decode(), 64))
    label = begin.removeprefix("-----BEGIN ")
    return f"{begin}\n{text}\n-----END {label}\n".encode()


def _pem(name: str, valid: Callable[[], bytes], read: Callable[[bytes], object]) -> Target:
    return Target(name, lambda: [valid()], pem_case, lambda _: read)


def _facts(data: bytes) -> object:
    return x.facts_of(x.certificates_from_pem(data, "the certificate")[0])


def _revoked(data: bytes) -> object:
    return x.read_revocation_list(data, [_authority().ca], "the list")


def _in_folder(name: str, source: str, file: str, mutate: Mutator, use: Callable[[Path], object]) -> Target:
    """A target that changes one file of a folder."""

    def prepare(folder: Path) -> Read:
        place = folder / "place"
        shutil.copytree(_authority().folder.parent / source, place)
        original = (place / file).read_bytes()

        def read(data: bytes) -> object:
            (place / file).write_bytes(data)
            try:
                return use(place)
            finally:
                (place / file).write_bytes(original)

        return read

    return Target(name, lambda: [_file(f"{source}/{file}")], mutate, prepare)


def _lines_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    lines = valid.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json_case(rng, lines[at], others)
    return b"\n".join(lines) + b"\n"


def _token_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    parts = valid.split(b":")
    parts[rng.randrange(len(parts))] = rng.choice(STRINGS).encode()
    return mutate_bytes(rng, valid, others) if rng.random() < 0.7 else b":".join(parts)


def _uri_case(rng: Random, valid: bytes, others: Sequence[bytes]) -> bytes:
    odd = valid + rng.choice(STRINGS).encode()
    return mutate_bytes(rng, valid, others) if rng.random() < 0.7 else odd


def _signed_code() -> bytes:
    text = Bundle({"own.py": "def net():\n    pass\n"}).text
    own = load(_authority().folder.parent / "server")
    facts = replace(own.facts, identity=Identity("operator", "ada"))
    return wire_code.stored(text, signed_code.sign(replace(own, facts=facts), text)).SerializeToString()


def _read_code(data: bytes) -> object:
    """Every check of a server or device, also of what an earlier one refuses."""
    stored = parsed(StoredCode, data)
    assert isinstance(stored, StoredCode)
    ca, header, proof = x.to_pem(_authority().ca), stored.header, wire_code.proof_of(stored.header)
    for check in (
        lambda: bundle.read(stored.text),
        lambda: signed_code.check(ca, header.sha256, stored.text, proof, ()),
        lambda: signed_code.signer(ca, proof, (), x.utc_now()),
    ):
        with suppress(FedelError):
            check()
    incoming = wire_code.Incoming(header)
    incoming.add(stored.text)
    return incoming.whole()


CERTIFICATES = (
    Target("signed_code", lambda: [_signed_code()], message_case(StoredCode), lambda _: _read_code),
    Target(
        "bundle",
        lambda: [Bundle({"own.py": "x = 1", "nets/small.py": "é"}).text],
        json_case,
        lambda _: bundle.read,
    ),
    _pem("certificate", lambda: _file("server/cert.pem"), _facts),
    _pem("private_key", lambda: _file("server/key.pem"), lambda data: x.key_from_pem(data, "the key")),
    _pem("signing_request", lambda: x.new_request(x.new_key()), lambda data: x.key_of_request(data, "it")),
    _pem("revocation_list", lambda: _file("ca/crl.pem"), _revoked),
    _in_folder("certificate_folder", "server", "cert.pem", pem_case, load),
    _in_folder("authority_tokens", "ca", "tokens.json", json_case, lambda place: Authority(place).promises()),
    _in_folder("authority_barred", "ca", "barred.json", json_case, lambda place: Authority(place)._barred()),
    _in_folder("authority_issued", "ca", "issued.jsonl", _lines_case, lambda place: Authority(place).issued()),
    Target(
        "token",
        lambda: [str(Token("jetson 1", "s3cret", b"x" * 32)).encode()],
        _token_case,
        lambda _: lambda data: Token.parse(data.decode("utf-8", "surrogateescape")),
    ),
    Target(
        "identity",
        lambda: [Identity("agent", "jetson 1").uri.encode()],
        _uri_case,
        lambda _: lambda data: Identity.parse(data.decode("utf-8", "replace")),
    ),
)
