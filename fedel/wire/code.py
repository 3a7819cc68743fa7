"""Code of jobs on its way: to a server in pieces, and from one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

from grpc import aio

from fedel.bundle import MAX_BYTES
from fedel.errors import ConfigError, ServiceError
from fedel.security.signed_keys import MAX_BYTES as MAX_PROOF
from fedel.security.signed_keys import Proof
from fedel.v1 import code_pb2 as pb

if TYPE_CHECKING:
    from fedel.v1.code_pb2_grpc import CodeServiceAsyncStub

PIECE_BYTES = 256 * 1024
SECONDS = 120.0
"""The most that sending or getting code may take."""
_HASH = re.compile("[0-9a-f]{64}")


def objection_to_hash(sha256: str) -> str:
    return "" if _HASH.fullmatch(sha256) else "the hash of the job's code is not one"


def objection_to_header(header: pb.CodeHeader) -> str:
    if not 1 <= header.num_bytes <= MAX_BYTES:
        return f"the job's code has {header.num_bytes} bytes, which is not between 1 and {MAX_BYTES}"
    if len(header.certificate) + len(header.signature) > MAX_PROOF:
        return "the certificate of the job's code is too long to be one"
    return objection_to_hash(header.sha256)


def proof_of(header: pb.CodeHeader) -> Proof:
    return Proof(header.certificate, header.signature)


def stored(text: bytes, proof: Proof) -> pb.StoredCode:
    sha256 = hashlib.sha256(text).hexdigest()
    header = pb.CodeHeader(
        sha256=sha256, num_bytes=len(text), certificate=proof.certificate, signature=proof.signature
    )
    return pb.StoredCode(header=header, text=text)


def pieces(text: bytes) -> Iterator[bytes]:
    for start in range(0, len(text), PIECE_BYTES):
        yield text[start : start + PIECE_BYTES]


class Incoming:
    """Collects the pieces of one code; never more than its header announced."""

    def __init__(self, header: pb.CodeHeader) -> None:
        if wrong := objection_to_header(header):
            raise ConfigError(wrong)
        self._header, self._text = header, bytearray()

    def add(self, piece: bytes) -> None:
        if len(self._text) + len(piece) > self._header.num_bytes:
            raise ConfigError(
                f"the job's code is longer than the {self._header.num_bytes} bytes it was said to have"
            )
        self._text += piece

    def whole(self) -> pb.StoredCode:
        if len(self._text) != self._header.num_bytes:
            raise ConfigError(
                f"the job's code ended after {len(self._text)} of {self._header.num_bytes} bytes: send it again"
            )
        return pb.StoredCode(header=self._header, text=bytes(self._text))


async def push(stub: CodeServiceAsyncStub, code: pb.StoredCode) -> None:
    """Send code to a server."""

    async def requests() -> AsyncIterator[pb.PutCodeRequest]:
        yield pb.PutCodeRequest(header=code.header)
        for piece in pieces(code.text):
            yield pb.PutCodeRequest(piece=piece)

    await stub.PutCode(requests(), timeout=SECONDS)


async def fetch(
    stub: CodeServiceAsyncStub, sha256: str, check: Callable[[pb.CodeHeader, bytes], None]
) -> pb.StoredCode:
    """Get code from a server. ``check`` gets the header and the server's revocation list, and raises to have
    nothing more of it."""
    call = stub.GetCode(pb.GetCodeRequest(sha256=sha256), timeout=SECONDS)
    try:
        first = await call.read()
        if not isinstance(first, pb.GetCodeResponse) or first.header.sha256 != sha256:
            raise ServiceError("the coordinator sent other code than the job names; nothing of it is used")
        incoming = Incoming(first.header)
        check(first.header, first.revocation_list)
        while isinstance(message := await call.read(), pb.GetCodeResponse):
            incoming.add(message.piece)
        if message is not aio.EOF:
            raise ServiceError("the job's code did not come whole: it is asked for again")
        return incoming.whole()
    finally:
        call.cancel()
