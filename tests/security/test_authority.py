"""The authority's folder: who gets a certificate, for how long, and who loses it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from fedel.errors import CertificateError
from fedel.security import certificates as x
from fedel.security.authority import Authority
from fedel.security.folder import CERT, KEY, Revocations, Watched, ensure_key, install, load
from fedel.security.identity import Identity
from fedel.security.tokens import Token
from tests.security.support import Pki

AGENT = Identity("agent", "jetson 1/a")


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


def days_left(facts: x.Facts) -> float:
    return (facts.not_after - x.utc_now()) / timedelta(days=1)


@pytest.mark.parametrize(("role", "days"), [("agent", 30), ("service", 90), ("operator", 30), ("viewer", 30)])
def test_lifetimes_by_role(pki: Pki, tmp_path: Path, role: str, days: int) -> None:
    facts = pki.authority.issue(tmp_path / role, Identity(role, "one")).facts
    assert (role, "one") == (facts.identity.role, facts.identity.name)
    assert days_left(facts) == pytest.approx(days, abs=0.01)


def test_private_keys_are_for_their_owner_alone(pki: Pki, tmp_path: Path) -> None:
    pki.authority.issue(tmp_path / "a", AGENT)
    for path in (tmp_path / "a" / KEY, pki.authority.folder / "ca.key"):
        assert 0o600 == path.stat().st_mode & 0o777, path


def test_issuing_again_changes_nothing_until_it_must(pki: Pki, tmp_path: Path) -> None:
    first = pki.authority.issue(tmp_path / "a", AGENT)
    assert first == pki.authority.issue(tmp_path / "a", AGENT)
    with pytest.raises(CertificateError, match="belongs to agent"):
        pki.authority.issue(tmp_path / "a", Identity("operator", "ada"))
    pki.authority.revoke(AGENT)
    second = pki.authority.issue(tmp_path / "a", AGENT)
    assert (first.key, first.facts.serial) != (second.key, second.facts.serial)
    assert first.key == second.key


def test_making_the_authority_again_keeps_it(pki: Pki) -> None:
    assert pki.authority.ca == Authority.create(pki.authority.folder).ca


def test_who_it_is_for_is_said_by_the_signer_and_not_by_the_request(pki: Pki, tmp_path: Path) -> None:
    request = x.new_request(ensure_key(tmp_path / "a"))
    cert = pki.authority.sign(request, AGENT)
    assert AGENT == install(tmp_path / "a", x.to_pem(pki.authority.ca), cert).facts.identity


def test_only_services_may_stand_behind_a_port(pki: Pki, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="only a service has hosts"):
        pki.authority.issue(tmp_path / "a", AGENT, ["server.lan"])


def test_a_request_that_its_key_did_not_sign_is_refused(pki: Pki, tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match="not a signing request"):
        pki.authority.sign(b"-----BEGIN NOTHING-----", AGENT)


def test_renewing_keeps_identity_hosts_and_lifetime(pki: Pki, tmp_path: Path) -> None:
    old = pki.authority.issue(tmp_path / "c", Identity("service", "c"), ["server.lan", "10.0.0.1"], days=7)
    cert = pki.authority.renew(x.new_request(ensure_key(tmp_path / "c")), old.facts, early=True)
    new = install(tmp_path / "c", old.ca, cert).facts
    assert (old.facts.identity, old.facts.hosts) == (new.identity, new.hosts)
    assert days_left(new) == pytest.approx(7, abs=0.01)
    assert old.facts.serial != new.serial


def test_what_is_revoked_is_not_renewed(pki: Pki, tmp_path: Path) -> None:
    old = pki.authority.issue(tmp_path / "a", AGENT)
    assert [f"{old.facts.serial:x}"] == [i.serial for i in pki.authority.revoke(AGENT)]
    with pytest.raises(CertificateError, match="is revoked"):
        pki.authority.renew(x.new_request(ensure_key(tmp_path / "a")), old.facts, early=True)
    assert ["revoked"] == [i.status(x.utc_now()) for i in pki.authority.issued()]


def test_revoking_somebody_unknown_says_so(pki: Pki) -> None:
    with pytest.raises(CertificateError, match="never issued"):
        pki.authority.revoke(AGENT)


def test_revocations_are_read_again_and_must_be_the_authoritys(pki: Pki, tmp_path: Path) -> None:
    own = pki.authority.issue(tmp_path / "a", AGENT)
    path = pki.authority.folder / "crl.pem"
    revoked = Revocations(path, Watched(tmp_path / "a"))
    assert own.facts.serial not in revoked
    pki.authority.revoke(AGENT)
    assert own.facts.serial in revoked
    path.write_bytes((Pki(tmp_path / "other").authority.folder / "crl.pem").read_bytes())
    assert own.facts.serial in revoked, "a list of another authority is not believed"
    path.unlink()
    assert own.facts.serial in revoked, "deleting the list un-revokes nobody"


def test_files_that_do_not_fit_are_refused_and_a_running_process_keeps_the_old(
    pki: Pki, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    old = pki.authority.issue(folder, AGENT)
    watched = Watched(folder)
    other = pki.authority.issue(tmp_path / "b", Identity("agent", "b"))
    (folder / CERT).write_bytes(other.cert)
    with pytest.raises(CertificateError, match="does not belong to"):
        load(folder)
    assert old == watched.current()
    (folder / KEY).write_bytes(other.key)
    assert "b" == watched.current().facts.identity.name


def test_a_certificate_of_another_authority_is_refused(pki: Pki, tmp_path: Path) -> None:
    pki.authority.issue(tmp_path / "a", AGENT)
    (tmp_path / "a" / "ca.pem").write_bytes(x.to_pem(Pki(tmp_path / "other").authority.ca))
    with pytest.raises(CertificateError, match="not signed by the authority"):
        load(tmp_path / "a")


def test_two_authorities_are_trusted_while_one_replaces_the_other(pki: Pki, tmp_path: Path) -> None:
    own = pki.authority.issue(tmp_path / "a", AGENT)
    new = x.to_pem(Pki(tmp_path / "new").authority.ca)
    (tmp_path / "a" / "ca.pem").write_bytes(new + own.ca)
    assert own.facts == load(tmp_path / "a").facts


def test_a_token_is_good_once_for_one_name(pki: Pki, tmp_path: Path) -> None:
    token = Token.parse(str(pki.authority.promise(AGENT)))
    assert (AGENT.name, x.fingerprint(pki.authority.ca)) == (token.name, token.fingerprint)
    assert token.secret not in (pki.authority.folder / "tokens.json").read_text()
    request = x.new_request(ensure_key(tmp_path / "a"))
    grant, cert = pki.authority.redeem(token.secret, request)
    assert AGENT == grant.identity == x.facts_of_pem(cert).identity
    with pytest.raises(CertificateError, match="unknown, used or expired"):
        pki.authority.redeem(token.secret, request)


def test_a_token_expires_and_goes_with_its_name(pki: Pki, tmp_path: Path) -> None:
    request = x.new_request(ensure_key(tmp_path / "a"))
    late = pki.authority.promise(AGENT, hours=0)
    with pytest.raises(CertificateError, match="unknown, used or expired"):
        pki.authority.redeem(late.secret, request)
    pki.authority.issue(tmp_path / "a", AGENT)
    dropped = pki.authority.promise(AGENT)
    pki.authority.revoke(AGENT)
    with pytest.raises(CertificateError, match="unknown, used or expired"):
        pki.authority.redeem(dropped.secret, request)


def test_a_damaged_request_does_not_use_up_the_token(pki: Pki, tmp_path: Path) -> None:
    token = pki.authority.promise(AGENT)
    with pytest.raises(CertificateError, match="not a signing request"):
        pki.authority.redeem(token.secret, b"nothing")
    pki.authority.redeem(token.secret, x.new_request(ensure_key(tmp_path / "a")))


@pytest.mark.parametrize("text", ["", "name", "name:secret", "name:secret:c2hvcnQ", "name::" + 43 * "a"])
def test_half_a_token_is_refused(text: str) -> None:
    with pytest.raises(CertificateError, match="not a complete token"):
        Token.parse(text)


@pytest.mark.parametrize("uri", ["fedel://agent", "https://agent/a", "fedel://root/a", "fedel://agent/"])
def test_other_identities_are_refused(uri: str) -> None:
    with pytest.raises(CertificateError):
        Identity.parse(uri)
