"""Code that comes with a job: whether this device takes it, where it gets it, and who vouches for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from fedel import bundle
from fedel.errors import CertificateError, ConfigError, FedelError
from fedel.job_code import JobCode
from fedel.plugins import Allowed, refusal_of_code
from fedel.security import signed_code
from fedel.security.certificates import utc_now
from fedel.security.folder import Credentials, Revocations, Watched
from fedel.security.tls import Tls
from fedel.serialisation import parse_json
from fedel.v1 import coordinator_pb2
from fedel.v1.code_pb2 import CodeHeader, StoredCode
from fedel.v1.code_pb2_grpc import CodeServiceStub
from fedel.wire import code as wire
from fedel.wire.channel import Dialer
from fedel_edge.joined_runs import identity_of
from fedel_edge.run_folder import kept_code

_log = logging.getLogger(__name__)
LIST = "crl.pem"
"""File in ``state_dir``: the newest list of revoked certificates that came with code."""


@dataclass(frozen=True)
class TakenCode:
    """Code that this device takes, as it came and as it is imported."""

    stored: StoredCode
    code: JobCode


class _Revoked:
    """All lists that this device knows: its owner's, and the newest one that a server sent."""

    def __init__(self, tls: Tls, state_dir: Path) -> None:
        watched = Watched(tls.folder)
        self._sent, self._owners = Revocations(state_dir / LIST, watched), Revocations(tls.crl_path, watched)

    def learn(self, pem: bytes) -> None:
        try:
            if pem:
                self._sent.install(pem, "the list that came with the job's code")
        except (FedelError, OSError) as error:
            _log.warning("%s", error)

    def __contains__(self, serial: object) -> bool:
        return serial in self._sent or serial in self._owners


class CodeDesk:
    """Takes code for this device, or says why not."""

    def __init__(self, allowed: Allowed, tls: Tls, state_dir: Path, client: str) -> None:
        self._allowed, self._tls, self._state_dir, self._client = allowed, tls, state_dir, client
        self._revoked = _Revoked(tls, state_dir) if tls.secure else None

    async def take(self, offer: coordinator_pb2.RunOffer, dialer: Dialer, address: str) -> TakenCode | None:
        """The code of a run; ``None`` if it came with none."""
        sha256 = _hash_in(offer)
        if not sha256:
            return None
        own = dialer.credentials
        if own is None or self._revoked is None:
            raise CertificateError(
                "this job comes with code, and without certificates nobody can tell who wrote it: give this"
                " device a certificate (docs/security.md)"
            )
        kept = kept_code(self._state_dir, offer.run, identity_of(offer))
        if kept is not None and kept.header.sha256 == sha256:
            # It was valid when it came here: a run may take longer than its operator's certificate is valid.
            signer = self._signer(own, kept.header, expires=False)
        else:
            kept = await wire.fetch(
                CodeServiceStub(dialer.channel(address)),
                sha256,
                lambda header, sent: self._look(own, header, sent),
            )
            signer = self._signer(own, kept.header)
        signed_code.check(own.ca, sha256, kept.text, wire.proof_of(kept.header), self._revoked)
        scope = f"{self._client}\n{self._state_dir}\n{identity_of(offer)}"
        _log.info("taking the code %s of %s", sha256[:12], signer, extra={"run": offer.run})
        return TakenCode(kept, JobCode(bundle.read(kept.text), signer, scope))

    def _look(self, own: Credentials, header: CodeHeader, sent: bytes) -> None:
        """Before anything but the header has come."""
        assert self._revoked is not None
        self._revoked.learn(sent)
        self._signer(own, header)

    def _signer(self, own: Credentials, header: CodeHeader, expires: bool = True) -> str:
        assert self._revoked is not None
        proof, now = wire.proof_of(header), utc_now() if expires else None
        signer = signed_code.signer(own.ca, proof, self._revoked, now)
        if not self._allowed.takes_from(signer):
            raise ConfigError(refusal_of_code(signer))
        return signer


def _hash_in(offer: coordinator_pb2.RunOffer) -> str:
    try:
        sha256 = parse_json(offer.config_json).get("bundle", "")
    except (ValueError, AttributeError):
        return ""  # its parser says what is wrong with it
    if sha256 and (not isinstance(sha256, str) or wire.objection_to_hash(sha256)):
        raise ConfigError(f"run '{offer.run}': bundle is not a SHA-256")
    return str(sha256)
