"""``fedel agent install`` into a directory tree, which changes nothing on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from fedel_edge.__main__ import load

from fedel.cli import install
from fedel.cli.main import main
from fedel.errors import ConfigError
from fedel.security.folder import load as load_credentials
from fedel.security.identity import Identity
from tests.security.support import Pki, servers
from tests.services.coordinator.support import asynchronous

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None or shutil.which("systemctl") is None or os.getuid() != 0,
    reason="needs the tools of systemd, and root for the owners of files",
)


def tree(folder: Path) -> Path:
    root = folder / "root"
    (root / "etc").mkdir(parents=True)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file() and not p.is_symlink()}


@needs_systemd
@asynchronous
async def test_install_enrols_and_a_second_call_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pki, root = Pki(tmp_path), tree(tmp_path)
    async with servers(tmp_path, pki) as made:
        token = str(pki.authority.promise(Identity("agent", "jetson-1"), (), 1.0))
        words = ["agent", "install", "--root", str(root), "--coordinator", made.coordinator_address]
        words += ["--token", token, "--enrol-at", made.enrolment_address, "--part", "1/4"]
        assert 0 == await asyncio.to_thread(main, words), capsys.readouterr().err
        before = contents(root)
        assert 0 == await asyncio.to_thread(main, words), "the token is used up, the certificate is there"
    assert before == contents(root)
    assert 4 == capsys.readouterr().out.count("is as it should be") + (install._systemd_version() < 254)
    config = load(str(root / "etc/fedel/agent.toml"))
    assert (1, 4, made.coordinator_address) == (config.data.index, config.data.of, config.coordinator)
    assert Identity("agent", "jetson-1") == load_credentials(root / "etc/fedel/certs").facts.identity
    assert 0o600 == (root / "etc/fedel/certs/key.pem").stat().st_mode & 0o777
    assert "fedel-agent:" in (root / "etc/passwd").read_text()
    assert (root / "etc/systemd/system/multi-user.target.wants/fedel-agent.service").is_symlink()


@needs_systemd
def test_changed_settings_are_kept(tmp_path: Path) -> None:
    root = tree(tmp_path)
    settings = root / "etc/fedel/agent.toml"
    settings.parent.mkdir()
    settings.write_text('coordinator = "a:1"\nslowdown = 2.0\n[data]\nof = 3\n')
    Pki(tmp_path).authority.issue(root / "etc/fedel/certs", Identity("agent", "jetson-1"))
    assert 0 == main(["agent", "install", "--root", str(root), "--coordinator", "b:2"])
    config = load(str(settings))
    assert ("b:2", 2.0, 3) == (config.coordinator, config.slowdown, config.data.of)
    assert 0 == main(["agent", "uninstall", "--root", str(root)])
    assert settings.exists()
    assert not list((root / "etc/systemd").rglob("fedel-agent*"))


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tree(tmp_path)
    words = ["--coordinator", "server.lan:7070", "--token", "t", "--dry-run"]
    assert 0 == main(["agent", "install", "--root", str(root), *words])
    said = capsys.readouterr().out
    for word in (
        "fedel-agent.service",
        "sysusers",
        'coordinator = "server.lan:7070"',
        "server.lan:7072",
        "enable",
    ):
        assert word in said
    assert {} == contents(root)


def test_missing_option_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 2 == main(["agent", "install", "--root", str(tree(tmp_path))])
    assert "add --coordinator" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["4/4", "1", "a/b"])
def test_wrong_part(tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--root", str(tree(tmp_path)), "--coordinator", "a:1", "--token", "t", "--part", part]
    assert 2 == main(["agent", "install", *words])
    assert "0/4 for the first of four" in capsys.readouterr().err


def test_a_jetson_trains_with_its_gpu(tmp_path: Path) -> None:
    assert "cpu" == install._training_device(tmp_path)
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("NVIDIA Jetson Orin Nano Developer Kit\0")
    assert "cuda" == install._training_device(tmp_path)


def test_the_interpreter_in_a_home_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/home/somebody/python3.12")
    monkeypatch.setattr(install.sys, "executable", str(python))
    with pytest.raises(
        ConfigError, match=r"the Python of .*/venv/bin/fedel, /home/somebody/python3.12, is in a home"
    ):
        install._unit(install.Place(Path("/")))
