"""What a backup says about itself: versions, rounds, and the checksum of every file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedel.errors import DataError
from fedel.roles.run_state import ENDED
from fedel.serialisation import from_json

MANIFEST = "manifest.json"
FORMAT = 1
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileFacts:
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class RunRounds:
    """How many rounds of a run have made a model, by who says so."""

    phase: str = ""
    database: int | None = None
    """``None`` in a backup without the database."""
    sealed: bool = False
    """The database has sealed the next round: aggregators may have made its model already."""
    aggregators: dict[str, int] = field(default_factory=dict)
    """By part of the backup, such as ``aggregator-0``."""


@dataclass(frozen=True)
class Manifest:
    format: int
    fedel: str
    """Version of FedEL that made the backup."""
    made_at: str
    """ISO 8601, UTC."""
    schema: int | None
    """Step of the database's schema; ``None`` in a backup without the database."""
    runs: dict[str, RunRounds]
    files: dict[str, FileFacts]
    """By path in the backup."""

    @property
    def parts(self) -> list[str]:
        """The first word of every path: ``database.sqlite``, ``aggregator-0``, ``authority`` ..."""
        return sorted({path.partition("/")[0] for path in self.files})


def facts_of(path: Path) -> FileFacts:
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
    return FileFacts(num_bytes, digest.hexdigest())


def read(backup: Path) -> Manifest:
    path = backup / MANIFEST
    if not path.is_file():
        raise DataError(f"{backup} has no {MANIFEST}: name a folder that `fedel backup` made")
    manifest = from_json(Manifest, path.read_bytes(), str(path))
    if any(".." in Path(name).parts or Path(name).is_absolute() for name in manifest.files):
        raise DataError(f"{path} names files outside of the backup: it was not made by `fedel backup`")
    if manifest.format != FORMAT:
        raise DataError(
            f"{path}: a backup of format {manifest.format}, made by FedEL {manifest.fedel}; this version reads"
            f" format {FORMAT}: use the version that made it"
        )
    return manifest


def verify(backup: Path, manifest: Manifest) -> None:
    """``DataError`` unless every file is there, and as it was written."""
    for name, facts in manifest.files.items():
        path = backup / name
        if not path.is_file():
            raise DataError(f"{path} is missing: the backup is not whole; use another one")
        if facts_of(path) != facts:
            raise DataError(f"{path} is not what was written (its checksum differs): use another backup")


def mismatches(manifests: Sequence[Manifest]) -> list[str]:
    """What keeps runs from going on after a restore of these backups together, one line for each run."""
    lines = []
    for name in sorted({name for manifest in manifests for name in manifest.runs}):
        found = [manifest.runs[name] for manifest in manifests if name in manifest.runs]
        database = next((each for each in found if each.database is not None), None)
        if database is None or database.database is None or database.phase in ENDED:
            continue
        rounds = database.database
        held = {part: number for each in found for part, number in each.aggregators.items()}
        # One ahead: they give their answers about the round again, each if it is sealed, otherwise only all.
        is_next = database.sealed or set(held.values()) == {rounds + 1}
        lines += [
            f"run '{name}': {part} is at round {number}, the database at {rounds}: it cannot go on from this"
            for part, number in sorted(held.items())
            if number != rounds and not (is_next and number == rounds + 1)
        ]
    return lines


def rounds_of(runs: Mapping[str, RunRounds], part: str, versions: Mapping[str, int]) -> dict[str, RunRounds]:
    """The rounds of the runs, with those of one more aggregator."""
    known = {name: runs.get(name, RunRounds()) for name in {*runs, *versions}}
    for name, number in versions.items():
        before = known[name]
        aggregators = {**before.aggregators, part: number}
        known[name] = RunRounds(before.phase, before.database, before.sealed, aggregators)
    return known
