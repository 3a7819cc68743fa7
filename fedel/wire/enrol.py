"""Get the first certificate of a process, and later ones, over the network."""

from __future__ import annotations

import hashlib
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from fedel.errors import CertificateError, ServiceError
from fedel.security import certificates as x
from fedel.security.folder import CA, Credentials, ensure_key, install
from fedel.security.tls import host_of
from fedel.security.tokens import Token
from fedel.v1 import enrolment_pb2 as pb
from fedel.v1.enrolment_pb2_grpc import EnrolmentServiceStub
from fedel.wire.channel import OPTIONS
from fedel.wire.retry import describe, is_transient

TIMEOUT_SECONDS = 20.0


def fetch_authority(address: str, fingerprint: bytes) -> bytes:
    """The authority's certificate in PEM format, as the server sends it; its fingerprint is checked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # We send nothing on this connection. We trust the certificate only if its fingerprint matches.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        place = (host_of(address), int(address.rpartition(":")[2]))
        with socket.create_connection(place, TIMEOUT_SECONDS) as raw, context.wrap_socket(raw) as secured:
            chain = _chain(secured)
    except (OSError, ValueError) as error:
        raise ServiceError(
            f"cannot reach {address}: {error}; is this the enrolment port of the coordinator (7072)?"
        ) from None
    for der in chain:
        if hashlib.sha256(der).digest() == fingerprint:
            _check_name(address, chain[0])
            return ssl.DER_cert_to_PEM_cert(der).encode()
    raise CertificateError(
        f"{address} does not belong to the federation that made the token: its authority has another "
        "fingerprint. Check the address. If it is correct, the connection may be intercepted"
    )


def _check_name(address: str, der: bytes) -> None:
    """gRPC says no more than that a name does not fit; here the names that would are known."""
    hosts, host = x.facts_of_pem(ssl.DER_cert_to_PEM_cert(der).encode()).hosts, host_of(address)
    if hosts and host not in hosts and not any(each.startswith("*") for each in hosts):
        raise CertificateError(
            f"the certificate of the server at {address} is for {', '.join(hosts)}, not for {host}: use one of"
            f" these names, or issue it again there: `fedel certs issue NAME --role service --host {host}`"
        )


def _chain(secured: ssl.SSLSocket) -> list[bytes]:
    """Every certificate that the server sent, in DER format."""
    if hasattr(secured, "get_unverified_chain"):
        found: list[bytes] = secured.get_unverified_chain()
        return found
    # Python 3.10 to 3.12 have it under a private name, which these versions will not change any more.
    inner: Any = secured._sslobj  # type: ignore[attr-defined]
    return [ssl.PEM_cert_to_DER_cert(one.public_bytes()) for one in inner.get_unverified_chain()]


async def enrol(address: str, token: Token, folder: Path, ca: bytes) -> Credentials:
    """Exchange the token for a certificate; the key is made in ``folder``, ``ca`` is the fetched authority."""
    request = x.new_request(ensure_key(folder))
    credentials = grpc.ssl_channel_credentials(ca)
    async with aio.secure_channel(address, credentials, options=OPTIONS) as channel:
        message = pb.EnrolRequest(secret=token.secret, signing_request=request)
        answer = await _asked(
            address, EnrolmentServiceStub(channel).Enrol(message, timeout=TIMEOUT_SECONDS), True
        )
    return install(folder, ca, answer.certificates)


async def renew(channel: aio.Channel, folder: Path, address: str = "the coordinator") -> Credentials:
    """Get the next certificate for the key in ``folder``, over a channel that uses the current one."""
    request = x.new_request(ensure_key(folder))
    message = pb.RenewRequest(signing_request=request)
    answer = await _asked(address, EnrolmentServiceStub(channel).Renew(message, timeout=TIMEOUT_SECONDS))
    return install(folder, (folder / CA).read_bytes(), answer.certificates)


async def _asked(address: str, call: Any, enrolling: bool = False) -> Any:
    try:
        return await call
    except aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise ServiceError(
                f"{address} does not sign certificates: set enrolment.authority on that coordinator"
            ) from None
        hint = (
            "; is this the enrolment port of the coordinator (7072)?"
            if enrolling and is_transient(error)
            else ""
        )
        raise ServiceError(f"{address}: {describe(error)}{hint}") from None
