"""Damaged certificates, requests, lists, keys, tokens and files are refused with our own error and no other."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from fedel_coordinator import enrolment
from grpc import aio

from fedel.errors import CertificateError
from fedel.security import certificates as x
from fedel.security.authority import BARRED, ISSUED, Authority
from fedel.security.folder import load
from fedel.security.identity import Identity
from fedel.security.tokens import TOKENS, Token
from fedel.v1 import enrolment_pb2 as pb
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from tests.security.support import Pki, refusal, servers
from tests.services.coordinator.support import asynchronous

CASES = 1500
Decoder = Callable[[bytes], object]


def mutated(text: bytes, random_: random.Random) -> bytes:
    """A few bytes changed, removed or added: inside the base64 of a PEM file, so that its frame stays whole."""
    lines = text.split(b"\n")
    framed = len(lines) > 2 and lines[0].startswith(b"-----BEGIN") and random_.random() < 0.9
    raw = bytearray(base64.b64decode(b"".join(lines[1:-2])) if framed else text)
    for _ in range(random_.choice((1, 1, 2, 5))):
        place, kind = random_.randrange(len(raw)), random_.random()
        if kind < 0.7:
            raw[place] = random_.choice((0, 1, 127, 128, 255, random_.randrange(256)))
        elif kind < 0.85:
            del raw[place : place + random_.randint(1, 8)]
        else:
            raw[place:place] = random_.randbytes(random_.randint(1, 8))
        raw = raw or bytearray(1)
    if not framed:
        return bytes(raw)
    return b"\n".join([lines[0], base64.encodebytes(raw).strip(), *lines[-2:]])


def error_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def decoders(pki: Pki) -> dict[str, tuple[bytes, Decoder]]:
    own, ca = load(pki.tls("service", "one").folder), pki.authority.ca
    pki.authority.revoke(Identity("service", "one"))

    def certificate(pem: bytes) -> object:
        found = x.certificates_from_pem(pem, "here")[0]
        return found.public_key(), x.signed_by(found, [ca]), x.facts_of(found)

    return {
        "key": (own.key, lambda pem: x.key_from_pem(pem, "here").public_key()),
        "certificate": (own.cert.split(b"-----END")[0] + b"-----END CERTIFICATE-----\n", certificate),
        "request": (x.new_request(x.new_key()), lambda pem: x.key_of_request(pem, "here")),
        "list": (pki.authority.signed_list(), lambda pem: x.read_revocation_list(pem, [ca], "here")),
        "token": (
            str(pki.authority.promise(Identity("agent", "a"))).encode(),
            lambda text: Token.parse(text.decode("utf-8", "surrogateescape")),
        ),
    }


@pytest.mark.parametrize("kind", ["key", "certificate", "request", "list", "token"])
def test_damage_is_refused_with_our_error_alone(tmp_path: Path, kind: str) -> None:
    sound, decode = decoders(Pki(tmp_path))[kind]
    decode(sound)
    random_ = random.Random(kind)
    found = [error_of(lambda: decode(mutated(sound, random_))) for _ in range(CASES)]
    assert {CertificateError, None} >= {type(error) if error else None for error in found}
    assert sum(error is not None for error in found) > CASES / 4


@pytest.mark.parametrize("name", [ISSUED, TOKENS, BARRED])
def test_a_damaged_file_of_the_authority_is_named(tmp_path: Path, name: str) -> None:
    pki = Pki(tmp_path)
    pki.tls("agent", "a")
    pki.authority.promise(Identity("agent", "b"))
    pki.authority.revoke(Identity("agent", "a"))
    path = pki.authority.folder / name
    sound, random_ = path.read_bytes(), random.Random(name)
    authority = Authority(pki.authority.folder)
    for _ in range(200):
        path.write_bytes(mutated(sound, random_))
        for read in (authority.issued, authority.promises, authority._barred):
            error = error_of(read)
            assert error is None or (type(error) is CertificateError and str(path) in str(error)), repr(error)


@asynchronous
async def test_the_enrolment_port_answers_garbage_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment, "ENROL_BURST", 1_000_000)
    pki, random_ = Pki(tmp_path), random.Random(7)
    credentials = grpc.ssl_channel_credentials(load(pki.tls("agent", "a").folder).ca)
    sound, codes = x.new_request(x.new_key()), set()
    async with (
        servers(tmp_path, pki) as made,
        aio.secure_channel(made.enrolment_address, credentials) as channel,
    ):
        stub = EnrolmentServiceStub(channel)
        for _ in range(300):
            request = pb.EnrolRequest(secret="x", signing_request=mutated(sound, random_))
            codes.add(await refusal(stub.Enrol(request)))
        bytes_call = channel.unary_unary("/fedel.v1.EnrolmentService/Enrol")
        assert ("INVALID_ARGUMENT", "message") == await refusal(bytes_call(b"\x0a\xff\xff\xff"))
        assert "RESOURCE_EXHAUSTED" == (await refusal(bytes_call(bytes(100_000))))[0]
    assert ("INVALID_ARGUMENT", "request") in codes
    assert codes <= {("INVALID_ARGUMENT", "request"), ("UNAUTHENTICATED", "token")}
    assert not [r for r in caplog.records if r.exc_info or "Traceback" in r.getMessage()]


@asynchronous
async def test_one_address_cannot_flood_the_enrolment_port_or_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path)
    credentials = grpc.ssl_channel_credentials(load(pki.tls("agent", "a").folder).ca)
    request = pb.EnrolRequest(secret="guess", signing_request=x.new_request(x.new_key()))
    async with servers(tmp_path, pki) as made:
        async with aio.secure_channel(made.enrolment_address, credentials) as channel:
            stub = EnrolmentServiceStub(channel)
            found = [await refusal(stub.Enrol(request)) for _ in range(100)]
            bytes_call = channel.unary_unary("/fedel.v1.EnrolmentService/Enrol")
            garbage = {await refusal(bytes_call(b"\x0a\xff\xff\xff")) for _ in range(100)}
        refused = await made.refused("rate")
    assert refused == found.count(("RESOURCE_EXHAUSTED", "rate")) > 40
    assert {("INVALID_ARGUMENT", "message")} == garbage
    lines = [r for r in caplog.records if r.getMessage().startswith("refused:")]
    assert len(lines) < 60, "the others are only counted"
