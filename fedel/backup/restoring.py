"""Puts a backup where the servers expect their files. Everything is checked before anything is changed."""

from __future__ import annotations

import shutil
import socket
from contextlib import ExitStack
from pathlib import Path

from fedel_aggregator.server import lock_folder

from fedel.backup import database, manifest
from fedel.backup.manifest import Manifest
from fedel.backup.mirror import SKIPPED, copy_file
from fedel.backup.places import AGGREGATOR, AUTHORITY, DATABASE, Places
from fedel.errors import ConfigError, ServiceError
from fedel.files import sync_directory

ARRIVING = ".restore.tmp"
"""In a folder: what is on its way into it."""


def restore(backup: Path, places: Places, *, force: bool = False) -> Manifest:
    """Restore the parts of the servers named. ``force`` replaces what is there."""
    found = manifest.read(backup)
    folders = _targets(found, places)
    if found.schema is not None:
        database.check_schema(found.schema, str(backup / DATABASE))
    manifest.verify(backup, found)
    with ExitStack() as stack:
        _check_stopped(places, stack)
        url = places.coordinator.database_url if places.coordinator else ""
        occupied = [str(folder) for folder in folders.values() if _is_occupied(folder)]
        if url and not database.is_empty(url):
            occupied.append("the database")
        if occupied and not force:
            raise ConfigError(
                f"there is something in {', '.join(occupied)}: move it away, or replace it with --force"
            )
        for part, folder in folders.items():
            _fill(folder, backup, part, found)
        if url:
            # Last: a coordinator that starts after an interrupted restore finds no run.
            database.restore(backup / DATABASE, found.schema or 0, url)
    return found


def _targets(found: Manifest, places: Places) -> dict[str, Path]:
    """Where each part goes; refused if the backup does not hold what the servers need."""
    parts = found.parts
    if places.coordinator is not None and DATABASE not in parts:
        raise ConfigError(f"this backup has no database, only {', '.join(parts)}: leave --coordinator out")
    held = sum(part.startswith(AGGREGATOR) for part in parts)
    if places.aggregators and len(places.aggregators) != held:
        raise ConfigError(
            f"this backup is of {held} aggregators, and {len(places.aggregators)} are named: name one"
            " configuration for each, in the same order"
        )
    folders = {**places.data(), **places.certs()}
    if places.authority is not None:
        folders[AUTHORITY] = places.authority
    return {part: folder for part, folder in folders.items() if part in parts}


def _check_stopped(places: Places, stack: ExitStack) -> None:
    for folder in places.data().values():
        stack.enter_context(lock_folder(folder))
    if places.coordinator is not None and _answers(places.coordinator.listen):
        raise ServiceError(f"something listens at {places.coordinator.listen}: stop the coordinator first")


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]") or "localhost", int(port)), timeout=2):
            return True
    except (OSError, ValueError):
        return False


def _is_occupied(folder: Path) -> bool:
    entries = [path for path in folder.iterdir() if path.name not in SKIPPED] if folder.is_dir() else []
    return any(path.is_file() or any(inner.is_file() for inner in path.rglob("*")) for path in entries)


def _fill(folder: Path, backup: Path, part: str, found: Manifest) -> None:
    """Copy a part beside what is in the folder, then put it in the place of that."""
    arriving = folder / ARRIVING
    shutil.rmtree(arriving, ignore_errors=True)
    arriving.mkdir(mode=0o700, parents=True)
    for name, facts in found.files.items():
        if name.startswith(f"{part}/"):
            target = arriving / name.removeprefix(f"{part}/")
            if copy_file(backup / name, target) != facts:
                raise ServiceError(f"{backup / name} changed while it was restored: try again")
    for old in folder.iterdir():
        if old.name == ARRIVING or old.name == "lock":
            continue
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    for new in arriving.iterdir():
        new.rename(folder / new.name)
    arriving.rmdir()
    sync_directory(folder)
