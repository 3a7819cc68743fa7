"""Keys of secure aggregation, signed with the certificate of the client that made them."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from fedel.errors import CertificateError
from fedel.security import certificates as x
from fedel.security.folder import Credentials, check_valid
from fedel.security.identity import AGENT, Identity

_PURPOSE = b"fedel keys of secure aggregation\n"
MAX_BYTES = 10_000
"""Of a proof; real ones have about a thousand."""


class Proof(NamedTuple):
    """That keys are a client's own."""

    certificate: bytes = b""
    """In PEM format; empty without mTLS."""
    signature: bytes = b""


NO_PROOF = Proof()


def sign(credentials: Credentials, text: bytes) -> Proof:
    key = x.key_from_pem(credentials.key, "this device's key")
    own = x.certificates_from_pem(credentials.cert, "this device's certificate")[0]
    return Proof(x.to_pem(own), key.sign(_PURPOSE + text, ec.ECDSA(SHA256())))


def check(credentials: Credentials, client: str, text: bytes, proof: Proof, now: datetime) -> None:
    """``CertificateError`` unless the client has a certificate of our authority and signed the text with it."""
    where = f"the keys of client '{client}'"
    certificate = x.certificates_from_pem(proof.certificate, f"{where}: its certificate")[0]
    facts = x.facts_of(certificate)
    if not x.signed_by(certificate, x.certificates_from_pem(credentials.ca, "this device's ca.pem")):
        raise CertificateError(f"{where}: their certificate is not of this federation")
    if facts.identity != Identity(AGENT, client):
        raise CertificateError(f"{where} are signed by {facts.identity}")
    check_valid(facts, where, now)
    public = certificate.public_key()
    try:
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        public.verify(proof.signature, _PURPOSE + text, ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise CertificateError(f"{where} are not signed by it: somebody changed them on the way") from None
