"""A key that systemd hands over, and the certificates that the agent keeps for it."""

from __future__ import annotations

from pathlib import Path

from fedel_edge.certificates import VARIABLE, adopt, kept_folder
from fedel_edge.config import AgentConfig

from fedel.security.certificates import new_request
from fedel.security.folder import ensure_key, load
from fedel.security.identity import Identity
from fedel.security.tls import Tls
from tests.security.support import Pki


def config_of(folder: Path) -> AgentConfig:
    return AgentConfig(state_dir=folder / "state", tls=Tls(dir="/etc/fedel/certs"))


def test_own_folder_links_to_the_key(tmp_path: Path) -> None:
    handed = Pki(tmp_path).tls("agent", "jetson-1").folder
    config = adopt(config_of(tmp_path), {VARIABLE: str(handed)})
    own = config.tls.folder
    assert own == kept_folder(config)
    assert load(own) == load(handed)
    assert (own / "key.pem").is_symlink(), "the key itself stays where systemd put it"


def test_renewed_certificate_wins(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    handed = pki.tls("agent", "jetson-1", days=1).folder
    environment = {VARIABLE: str(handed)}
    own = adopt(config_of(tmp_path), environment).tls.folder
    renewed = pki.authority.sign(new_request(ensure_key(own)), Identity("agent", "jetson-1"), (), 2, "test")
    (own / "cert.pem").write_bytes(renewed)
    adopt(config_of(tmp_path), environment)
    assert (renewed, load(own)) == ((own / "cert.pem").read_bytes(), load(own))


def test_new_enrolment_wins(tmp_path: Path) -> None:
    """With another key, or as another client."""
    pki = Pki(tmp_path)
    first, second = pki.tls("agent", "jetson-1", days=9).folder, pki.tls("agent", "jetson-2", days=1).folder
    adopt(config_of(tmp_path), {VARIABLE: str(first)})
    config = adopt(config_of(tmp_path), {VARIABLE: str(second)})
    assert load(second) == load(config.tls.folder)


def test_damaged_copy_is_replaced(tmp_path: Path) -> None:
    handed = Pki(tmp_path).tls("agent", "jetson-1").folder
    own = adopt(config_of(tmp_path), {VARIABLE: str(handed)}).tls.folder
    (own / "cert.pem").write_bytes(b"half a certif")
    adopt(config_of(tmp_path), {VARIABLE: str(handed)})
    assert load(handed) == load(own)


def test_without_systemd(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert config is adopt(config, {})
    assert config is adopt(config, {VARIABLE: str(tmp_path)}), "credentials without a key are not for us"
