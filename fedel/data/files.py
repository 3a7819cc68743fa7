"""Data files: where they are cached, checksums, safe unpacking, and directories written completely or not."""

from __future__ import annotations

import hashlib
import lzma
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from fedel.errors import DataError
from fedel.types import Array

_ARCHIVE_ERRORS = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    # zipfile raises these for what it does not know: a method, a version, a password; for a name without end.
    *(NotImplementedError, RuntimeError, IndexError),
)


def data_root(root: str | Path | None = None) -> Path:
    """Directory of data sets: ``root``, else ``$FEDEL_DATA``, else ``~/.cache/fedel/data``."""
    chosen = root or os.environ.get("FEDEL_DATA") or "~/.cache/fedel/data"
    return Path(chosen).expanduser()


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def listed(folder: Path, pattern: str = "*") -> list[Path]:
    """Entries in an order that does not depend on the file system, without hidden ones."""
    return sorted((p for p in folder.glob(pattern) if not p.name.startswith(".")), key=lambda p: p.as_posix())


def first_with(folder: Path, name: str) -> Path:
    """``folder``, or the directory in it, that contains ``name``: archives often have one outer directory."""
    for place in (folder, *(p for p in listed(folder) if p.is_dir())):
        if (place / name).exists():
            return place
    raise DataError(f"{folder / name}: not found, nor in a directory inside {folder}; is it another data set?")


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that replaces ``target`` only if the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield part
        part.chmod(0o755)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            target.rename(old / "old")
            part.rename(target)
            shutil.rmtree(old)
        else:
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar (any compression) or zip; a member with a path outside ``target`` is refused."""
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as pack:
                for name in pack.namelist():
                    _inside(archive, target, name)
                pack.extractall(target)
        else:
            with tarfile.open(archive) as tar:
                for member in tar:
                    _inside(archive, target, member.name)
                    if member.isdir() or member.isreg():
                        _write_member(tar, member, target)
    except (*_ARCHIVE_ERRORS, EOFError, OSError) as problem:
        raise DataError(
            f"{archive}: cannot be unpacked ({problem}); damaged, incomplete or not an archive: get it again"
        ) from problem


def _inside(archive: Path, target: Path, name: str) -> None:
    place = (target / name).resolve()
    if not place.is_relative_to(target.resolve()):
        raise DataError(f"{archive}: member {name!r} would be written outside the target; do not use this file")


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Only plain files and directories, with our own permissions; links and devices are skipped."""
    place = target / member.name
    if member.isdir():
        place.mkdir(parents=True, exist_ok=True)
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    source = tar.extractfile(member)
    if source is not None:
        with source, place.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)


def decoded(
    folder: Path, key: str, files: list[Path], build: Callable[[], Mapping[str, Array]]
) -> Mapping[str, Array]:
    """Arrays made from many small files, cached next to them so that the next process need not decode again.

    The cache is used as long as names and sizes of the files are the same; without write access to the
    folder, each process decodes again.
    """
    listing = "\n".join(f"{p.relative_to(folder).as_posix()} {p.stat().st_size}" for p in files)
    state = hashlib.sha256(listing.encode()).hexdigest()[:16]
    copy = folder / ".decoded" / f"{key}-{state}.npz"
    if copy.exists():
        with suppress(OSError, ValueError, zipfile.BadZipFile), np.load(copy, allow_pickle=False) as saved:
            return {name: saved[name] for name in saved.files}
    arrays = build()
    with suppress(OSError):
        copy.parent.mkdir(exist_ok=True)
        part = copy.with_name(f".{os.getpid()}-{copy.name}")
        np.savez(part, allow_pickle=False, **arrays)
        part.rename(copy)
    return arrays
