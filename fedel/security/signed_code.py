"""Code of jobs, signed with the certificate of the operator who sends it."""

from __future__ import annotations

import hashlib
from collections.abc import Container
from datetime import datetime

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509 import Certificate

from fedel.errors import CertificateError
from fedel.security import certificates as x
from fedel.security.folder import Credentials, check_valid
from fedel.security.identity import OPERATOR
from fedel.security.signed_keys import MAX_BYTES, Proof

_PURPOSE = b"fedel code of a job\n"


def sign(credentials: Credentials, text: bytes) -> Proof:
    """At the operator's desk."""
    if credentials.facts.identity.role != OPERATOR:
        raise CertificateError(
            f"the job's code can only be signed by an operator, and the certificate here is of"
            f" {credentials.facts.identity}; name the folder of an operator's certificate with --certs"
        )
    key = x.key_from_pem(credentials.key, "the operator's key")
    own = x.certificates_from_pem(credentials.cert, "the operator's certificate")[0]
    return Proof(x.to_pem(own), key.sign(_signed(text), ec.ECDSA(SHA256())))


def check(ca: bytes, sha256: str, text: bytes, proof: Proof, revoked: Container[int]) -> None:
    """``CertificateError`` unless the text is the one that was announced, and its signer signed it."""
    if hashlib.sha256(text).hexdigest() != sha256:
        raise CertificateError(
            f"the job's code is not the one with the hash {sha256[:12]}: it was altered on the way"
        )
    certificate = _certificate(proof)
    _check_signer(ca, certificate, revoked)
    public = certificate.public_key()
    try:
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise InvalidSignature
        public.verify(proof.signature, _signed(text), ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise CertificateError(
            "the job's code is not signed by the certificate that came with it: it was altered on the way, or"
            " never signed"
        ) from None


def signer(ca: bytes, proof: Proof, revoked: Container[int], now: datetime | None = None) -> str:
    """Who a proof says that it is of, as ``[code] bundles`` names it: ``operator:NAME``.

    ``CertificateError`` if that is no operator of this federation. Without ``now`` the certificate may have
    expired: it was valid when the code came here.
    """
    certificate = _certificate(proof)
    facts = _check_signer(ca, certificate, revoked)
    if now is not None:
        check_valid(facts, "the job's code", now)
    return f"{facts.identity.role}:{facts.identity.name}"


def _certificate(proof: Proof) -> Certificate:
    if not proof.certificate or not proof.signature:
        raise CertificateError("the job's code is not signed: no device or server takes it")
    if len(proof.certificate) + len(proof.signature) > MAX_BYTES:
        raise CertificateError("the job's code: its certificate is too long to be one")
    return x.certificates_from_pem(proof.certificate, "the certificate of the job's code")[0]


def _check_signer(ca: bytes, certificate: Certificate, revoked: Container[int]) -> x.Facts:
    if not x.signed_by(certificate, x.certificates_from_pem(ca, "ca.pem")):
        raise CertificateError("the job's code is signed with a certificate of another federation")
    facts = x.facts_of(certificate)
    if facts.identity.role != OPERATOR:
        raise CertificateError(f"the job's code is signed by {facts.identity}, who is no operator")
    if facts.serial in revoked:
        raise CertificateError(f"the job's code is signed by {facts.identity}, whose certificate is revoked")
    return facts


def _signed(text: bytes) -> bytes:
    return _PURPOSE + hashlib.sha256(text).digest()
