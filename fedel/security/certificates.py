"""The part of X.509 that FedEL needs: keys, requests, certificates, revocation lists."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedel.errors import CertificateError
from fedel.security.identity import SERVICE, Identity

PrivateKey = ec.EllipticCurvePrivateKey
SKEW = timedelta(minutes=5)
"""A new certificate starts to be valid this much earlier, for machines whose clock is behind."""
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Facts:
    """The content of a certificate."""

    identity: Identity
    serial: int
    hosts: tuple[str, ...]
    """Names and addresses at which the service can be reached."""
    not_before: datetime
    not_after: datetime

    @property
    def lifetime(self) -> timedelta:
        return self.not_after - self.not_before

    def renewable(self, now: datetime) -> bool:
        """Whether two thirds of its lifetime have passed."""
        return self.not_after - now < self.lifetime / 3


@dataclass(frozen=True)
class RevocationList:
    """What a signed list says. A newer list of the same authority has a higher number."""

    authority: bytes
    """Fingerprint of the authority that signed it."""
    number: int
    revoked: Mapping[int, datetime]
    """When each serial number was revoked."""


def utc_now() -> datetime:
    return datetime.now(timezone.utc)


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def key_to_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


@contextmanager
def _reading(where: str, what: str) -> Iterator[None]:
    """Anyone may have written these bytes, and the library has a dozen classes of error for them."""
    try:
        yield
    except CertificateError:
        raise
    except Exception as error:
        raise CertificateError(f"{where}: not {what} in PEM format: {error}") from None


def key_from_pem(pem: bytes, where: str) -> PrivateKey:
    with _reading(where, "a private key"):
        key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{where}: not an elliptic-curve key; run `fedel certs request` to make one")
    return key


def certificates_from_pem(pem: bytes, where: str) -> list[x509.Certificate]:
    with _reading(where, "a certificate"):
        found = x509.load_pem_x509_certificates(pem)
        for certificate in found:
            certificate.public_key()  # read late, and an odd key raises
        return found


def to_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(_PEM)


def fingerprint(certificate: x509.Certificate) -> bytes:
    return certificate.fingerprint(hashes.SHA256())


def new_authority(name: str, days: float, now: datetime) -> tuple[PrivateKey, x509.Certificate]:
    """A self-signed certificate authority that may only sign end certificates."""
    key = new_key()
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = _key_usage(key_cert_sign=True, crl_sign=True)
    builder = (
        _builder(subject, subject, key.public_key(), now, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, builder.sign(key, hashes.SHA256())


def is_authority(certificate: x509.Certificate) -> bool:
    """Whether it signed itself and may sign others: devices trust this certificate and nothing above it."""
    with _reading("the authority", "a certificate"):
        try:
            limits = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        except x509.ExtensionNotFound:
            return False
        return limits.ca and signed_by(certificate, [certificate])


def new_request(key: PrivateKey) -> bytes:
    """A signing request proves that the sender has the key. The signer decides the identity."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(_PEM)


def key_of_request(pem: bytes, where: str) -> ec.EllipticCurvePublicKey:
    with _reading(where, "a signing request"):
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey) or not request.is_signature_valid:
            raise CertificateError(f"{where}: the request is not signed with its own elliptic-curve key")
    return key


def sign(
    ca_key: PrivateKey,
    ca: x509.Certificate,
    public_key: ec.EllipticCurvePublicKey,
    identity: Identity,
    hosts: Sequence[str],
    days: float,
    now: datetime,
) -> x509.Certificate:
    """A certificate; a service can also use it as a server, under the names in ``hosts``."""
    if hosts and identity.role != SERVICE:
        raise CertificateError(
            f"{identity}: only a service has hosts, because nothing connects to the other roles"
        )
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name[:64])])
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role == SERVICE:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = [x509.UniformResourceIdentifier(identity.uri), *map(_host, hosts)]
    builder = (
        _builder(subject, ca.subject, public_key, now, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
    )
    return builder.sign(ca_key, hashes.SHA256())


def facts_of(certificate: x509.Certificate) -> Facts:
    with _reading("the certificate", "a certificate of FedEL"):
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            raise CertificateError("the certificate has no identity: make it with `fedel certs`") from None
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        if len(uris) != 1:
            raise CertificateError(f"the certificate has {len(uris)} identities instead of one")
        hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
        return Facts(
            Identity.parse(uris[0]),
            certificate.serial_number,
            tuple(hosts),
            certificate.not_valid_before_utc,
            certificate.not_valid_after_utc,
        )


@lru_cache(maxsize=4096)
def facts_of_pem(pem: bytes) -> Facts:
    """Cached, because a peer sends the same certificate with every call."""
    return facts_of(certificates_from_pem(pem, "the peer's certificate")[0])


def signed_by(certificate: x509.Certificate, authorities: Collection[x509.Certificate]) -> bool:
    for authority in authorities:
        try:
            certificate.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
            continue
        return True
    return False


def revocation_list(
    ca_key: PrivateKey, ca: x509.Certificate, number: int, revoked: Mapping[int, datetime], now: datetime
) -> bytes:
    """A signed list of serial numbers with the time at which each was revoked."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now)
        # Required by the format; servers ignore it and use the file however old it is.
        .next_update(now + timedelta(days=3650))
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for serial, when in revoked.items():
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(_PEM)


def read_revocation_list(pem: bytes, authorities: Collection[x509.Certificate], where: str) -> RevocationList:
    """The list, if one of the authorities issued and signed it."""
    with _reading(where, "a revocation list"):
        crl = x509.load_pem_x509_crl(pem)
        issuers = [a for a in authorities if a.subject == crl.issuer and _signed_list(crl, a)]
        if not issuers:
            raise CertificateError(f"{where}: the list is not signed by this federation's authority")
        revoked = {entry.serial_number: entry.revocation_date_utc for entry in crl}
        return RevocationList(fingerprint(issuers[0]), _list_number(crl), revoked)


def _signed_list(crl: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key = authority.public_key()
    return isinstance(key, ec.EllipticCurvePublicKey) and crl.is_signature_valid(key)


def _list_number(crl: x509.CertificateRevocationList) -> int:
    try:
        return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        return 0  # made by a version that did not number its lists


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: float
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise CertificateError(f"host {host!r}: write a name or an address, without a port") from None


def _key_usage(**used: bool) -> x509.KeyUsage:
    names = (
        *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
    )
    return x509.KeyUsage(**{name: used.get(name, False) for name in names})
