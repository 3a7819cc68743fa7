"""Checks a data set on disk: compares checksums with the manifest, then counts all samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel.data.files import sha256
from fedel.data.registry import count_problems, entry, per_class
from fedel.data.store import get_command, read_manifest
from fedel.errors import DataError


@dataclass(frozen=True)
class Health:
    name: str
    path: str
    source: str = "copied here by hand, checksums not verified"
    remark: str = ""
    num_files: int = 0
    """Files whose checksum was verified."""
    num_train: int = 0
    num_test: int = 0
    sample_shape: tuple[int, ...] = ()
    num_users: int = 0
    per_class: Mapping[str, tuple[int, int]] | None = None
    """Class -> training and test samples; None for text and if files are damaged."""
    problems: tuple[str, ...] = ()


def check(name: str, root: Path) -> Health:
    """What is on disk and what is wrong with it; a missing data set is a DataError."""
    known, folder = entry(name), root / name
    if known.package:
        folder = Path(known.package)
    elif not folder.is_dir():
        raise DataError(f"{folder}: missing; run {get_command(known)}")
    manifest = None if known.package else read_manifest(folder)
    facts: dict[str, Any] = {"name": name, "path": str(folder)}
    if known.package:
        facts["source"] = f"comes with {known.package}"
    if manifest is not None:
        facts |= {"source": manifest.source, "remark": manifest.remark, "num_files": len(manifest.files)}
        damaged = [_file_problem(folder / path, recorded) for path, recorded in manifest.files.items()]
        problems = [f"{problem}; run `fedel data get {name} --force`" for problem in damaged if problem]
        if problems:
            return Health(**facts, problems=tuple(problems))
    data = known.load(folder)
    return Health(
        **facts,
        num_train=len(data.train),
        num_test=len(data.test),
        sample_shape=data.input_shape,
        num_users=len(data.user_names),
        per_class=None if data.kind == "text" else per_class(data),
        problems=tuple(known.audit(folder) + count_problems(known, data)),
    )


def _file_problem(path: Path, recorded: Mapping[str, Any]) -> str:
    if not path.exists():
        return f"{path}: missing"
    if path.stat().st_size != recorded["bytes"]:
        return f"{path}: {path.stat().st_size:,} bytes, but {recorded['bytes']:,} were recorded"
    return "" if sha256(path) == recorded["sha256"] else f"{path}: content has changed since the download"
