"""Code of jobs at a server: checked, and kept for devices; the server runs none that it does not allow."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from fedel import bundle
from fedel.errors import CertificateError, ConfigError
from fedel.files import write_atomic
from fedel.job_code import JobCode
from fedel.security import signed_code
from fedel.security.certificates import certificates_from_pem, facts_of, utc_now
from fedel.v1 import code_pb2 as pb
from fedel.v1.code_pb2_grpc import CodeServiceServicer
from fedel.wire import code as wire
from fedel_services.first_messages import Timed
from fedel_services.runtime import Server

IDLE_SECONDS = 20.0
KEPT_SECONDS = 86_400.0
"""Code that no run names stays for this long."""
NO_CERTIFICATES = (
    "code travels with a job only in a federation with certificates, because without them nobody can tell who"
    " wrote it: make some (docs/security.md), or copy the code to the machines and allow it in [code]"
)


class Shelf(Protocol):
    """Where a server keeps code, by hash. Its methods block."""

    def put(self, code: pb.StoredCode) -> None: ...

    def get(self, sha256: str) -> pb.StoredCode | None: ...


class FolderShelf:
    """A file for each code."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, code: pb.StoredCode) -> None:
        write_atomic(self._folder / code.header.sha256, code.SerializeToString(), mode=0o600)

    def get(self, sha256: str) -> pb.StoredCode | None:
        try:
            return pb.StoredCode.FromString((self._folder / sha256).read_bytes())
        except FileNotFoundError:
            return None
        except DecodeError:
            raise ConfigError(
                f"{self._folder / sha256} is damaged: restore it, or create the run again"
            ) from None

    def drop_unused(self, used: Collection[str]) -> None:
        """Delete code that no run names; that of a run that is just being created is new."""
        for path in self._folder.glob("*"):
            if path.name not in used and time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()


def load(shelf: Shelf, sha256: str, scope: str) -> JobCode | None:
    """The code that a run names by its hash; ``scope`` tells this run from others of the process. Blocks."""
    if not sha256:
        return None
    if wrong := wire.objection_to_hash(sha256):
        raise ConfigError(wrong)
    code = shelf.get(sha256)
    if code is None or hashlib.sha256(code.text).hexdigest() != sha256:
        raise ConfigError(f"the job's code {sha256[:12]} is not here: send it first, with `fedel run --code`")
    identity = facts_of(certificates_from_pem(code.header.certificate, "the job's code")[0]).identity
    return JobCode(bundle.read(code.text), f"{identity.role}:{identity.name}", scope)


class CodeServicer(CodeServiceServicer):
    def __init__(self, shelf: Shelf, server: Server) -> None:
        self._shelf, self._server = shelf, server

    async def PutCode(self, request_iterator: Any, context: Any) -> pb.PutCodeResponse:  # noqa: ARG002
        code = await _receive(Timed(request_iterator, IDLE_SECONDS, IDLE_SECONDS))
        await asyncio.to_thread(self._take, code)
        return pb.PutCodeResponse()

    def _take(self, code: pb.StoredCode) -> None:
        own, revoked = self._server.credentials, self._server.revocations
        if own is None or revoked is None:
            raise CertificateError(NO_CERTIFICATES)
        proof = wire.proof_of(code.header)
        signed_code.signer(own.ca, proof, revoked, utc_now())
        signed_code.check(own.ca, code.header.sha256, code.text, proof, revoked)
        bundle.read(code.text)
        self._shelf.put(code)

    async def GetCode(self, request: pb.GetCodeRequest, context: Any) -> AsyncIterator[pb.GetCodeResponse]:  # noqa: ARG002
        if wrong := wire.objection_to_hash(request.sha256):
            raise ConfigError(wrong)
        code = await asyncio.to_thread(self._shelf.get, request.sha256)
        if code is None:
            raise ConfigError(f"the job's code {request.sha256[:12]} is not here")
        revocations = self._server.revocations
        known = await asyncio.to_thread(revocations.newest) if revocations is not None else b""
        yield pb.GetCodeResponse(header=code.header, revocation_list=known)
        for piece in wire.pieces(code.text):
            yield pb.GetCodeResponse(piece=piece)


async def _receive(requests: AsyncIterator[pb.PutCodeRequest]) -> pb.StoredCode:
    incoming: wire.Incoming | None = None
    async for message in requests:
        if incoming is None:
            incoming = wire.Incoming(message.header)
        else:
            incoming.add(message.piece)
    if incoming is None:
        raise ConfigError("no code came")
    return incoming.whole()
