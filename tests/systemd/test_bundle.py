"""A bundle for another Python than the one that makes it."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

from fedel_edge.systemd.missing import missing


def wheel(folder: Path, name: str, *requirements: str) -> None:
    with ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:
        lines = ["Metadata-Version: 2.1", f"Name: {name}", *(f"Requires-Dist: {r}" for r in requirements)]
        made.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines) + "\n\n")


def test_what_only_the_devices_python_needs_is_missed(tmp_path: Path) -> None:
    wheel(tmp_path, "fedel", "tomli>=2; python_version < '3.11'", "some_thing", 'torch; extra == "edge"')
    wheel(tmp_path, "some_thing", "only-arm; platform_machine == 'aarch64'")
    assert {"tomli>=2", "only-arm"} == missing(tmp_path, "aarch64", "3.10")
    assert set() == missing(tmp_path, "x86_64", "3.11")
    wheel(tmp_path, "tomli")
    assert {"only-arm"} == missing(tmp_path, "aarch64", "3.10")


def test_the_agents_extra_is_in_the_bundle(tmp_path: Path) -> None:
    wheel(tmp_path, "fedel", 'pillow>=10; extra == "edge-own-torch"', 'aiohttp; extra == "server"')
    assert {"pillow>=10"} == missing(tmp_path, "x86_64", "3.11")
