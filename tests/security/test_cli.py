"""``fedel certs`` from the authority to a revoked device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedel.cli.main import main


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def certs(*arguments: str) -> int:
    return main(["certs", *arguments])


def test_from_the_authority_to_a_revoked_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == certs("init") == certs("init")
    assert 0 == certs("issue", "server", "--role", "service", "--host", "server.lan", "--host", "10.0.0.1")
    assert 0 == certs("request", "--dir", "device")
    assert not Path("device/cert.pem").exists()
    assert 0 == certs("sign", "device/request.pem", "jetson-1", "--dir", "device")
    assert 0 == certs("renew", "--dir", "device") == certs("renew", "--dir", "device", "--if-due")
    assert 0 == certs("token", "jetson-2")
    capsys.readouterr()
    assert 0 == certs("show", "--dir", "device", "--json")
    assert "jetson-1" == json.loads(capsys.readouterr().out)["name"]
    assert 0 == certs("revoke", "jetson-1")
    assert "Revoked 2 certificates" in capsys.readouterr().out
    assert 0 == certs("list", "--json")
    rows = json.loads(capsys.readouterr().out)
    assert ["valid", "revoked", "revoked", "token"] == [row["status"] for row in rows]
    assert ["server.lan", "10.0.0.1"] == rows[0]["hosts"]
    assert 8 == certs("renew", "--dir", "device")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["list"], "fedel certs init"),
        (["show", "--dir", "nowhere"], "nowhere/ca.pem is missing"),
        (["enrol", "half", "--at", "127.0.0.1:1"], "not a complete token"),
        (["enrol", "--token-file", "none", "--at", "127.0.0.1:1"], "name the file with the token"),
    ],
)
def test_mistakes_say_what_to_do(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs(*arguments) in (2, 8)
    assert complaint in capsys.readouterr().err


def test_enrolling_where_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    certs("init")
    certs("token", "jetson-1")
    token = capsys.readouterr().out.splitlines()[-1]
    assert 7 == certs("enrol", token, "--at", "127.0.0.1:1")
    assert "is this the enrolment port" in capsys.readouterr().err


def test_a_second_start_needs_no_token(capsys: pytest.CaptureFixture[str]) -> None:
    """A pod whose secret was deleted after its first start."""
    certs("init")
    certs("issue", "aggregator-0", "--role", "service", "--dir", "own")
    assert 0 == certs("enrol", "--token-file", "deleted", "--at", "127.0.0.1:1", "--dir", "own")
    assert "aggregator-0" in (said := capsys.readouterr().out)
    assert "no token is needed" in said


def test_an_authority_of_your_own(capsys: pytest.CaptureFixture[str]) -> None:
    """As cert-manager or a company makes one: the key stays where it is."""
    certs("init", "--authority", "theirs")
    secret = Path("secret")
    secret.mkdir()
    (secret / "tls.crt").write_bytes(Path("theirs/ca.pem").read_bytes())
    (secret / "tls.key").write_bytes(Path("theirs/ca.key").read_bytes())
    assert 0 == certs("init", "--from", "secret") == certs("init", "--from", "secret")
    assert Path("ca/ca.key").is_symlink()
    assert Path("ca/ca.pem").read_bytes() == Path("theirs/ca.pem").read_bytes()
    assert 0 == certs("issue", "jetson-1") == certs("revoke", "jetson-1")
    revoked = Path("ca/crl.pem").read_bytes()
    assert 0 == certs("init", "--from", "secret")
    assert revoked == Path("ca/crl.pem").read_bytes()

    certs("init", "--authority", "others")
    capsys.readouterr()
    assert 8 == certs("init", "--from", "secret", "--authority", "others")
    assert "has another authority already" in capsys.readouterr().err
    assert 8 == certs("init", "--from", "nowhere")
    assert "name a folder with tls.crt and tls.key" in capsys.readouterr().err
    (secret / "tls.crt").write_bytes(Path("certs/jetson-1/cert.pem").read_bytes())
    assert 8 == certs("init", "--from", "secret")
    assert "must be a certificate authority that signed itself" in capsys.readouterr().err
