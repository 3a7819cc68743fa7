"""``fedel backup`` and ``fedel restore``: what the servers of this machine keep, as it was at one moment."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.__main__ import read_config
from fedel_services.runtime import load_config

from fedel.backup import manifest
from fedel.backup.making import make
from fedel.backup.manifest import Manifest
from fedel.backup.places import Places
from fedel.backup.restoring import restore
from fedel.errors import ConfigError

BACKUP = """examples:
  fedel backup /backup/2026-11-18 --coordinator configs/coordinator.toml --aggregator configs/aggregator.toml
  fedel backup /backup/shard-1 --aggregator configs/aggregator.toml     # where only an aggregator runs
  fedel backup --verify /backup/2026-11-18
"""
RESTORE = """example:
  fedel restore /backup/2026-11-18 --coordinator configs/coordinator.toml --aggregator configs/aggregator.toml
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    backup = verbs.add_parser(
        "backup",
        description="Write database, authority, certificates, models and updates to a new folder, while runs"
        " go on. It belongs to one moment only if coordinator and aggregators are named in one command; where"
        " they are on several machines, pause the runs meanwhile (docs/operating.md). The folder has keys: keep"
        " it as safe as the servers.",
        epilog=BACKUP,
        formatter_class=raw,
    )
    backup.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="the new folder")
    backup.add_argument(
        "--verify",
        action="store_true",
        help="make nothing: check every file of these backups, and that their rounds belong together",
    )
    _add_places(backup)
    backup.set_defaults(run=main_backup)
    back = verbs.add_parser(
        "restore",
        description="Put a backup where the servers of these configurations expect their files. They must be"
        " stopped. All files are checked first. Runs go on from the round of the backup when the servers start;"
        " devices need nothing.",
        epilog=RESTORE,
        formatter_class=raw,
    )
    back.add_argument("folder", type=Path, metavar="DIR", help="a folder that `fedel backup` made")
    back.add_argument("--force", action="store_true", help="replace what is there")
    _add_places(back)
    back.set_defaults(run=main_restore)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--coordinator", metavar="FILE", help="configuration of this machine's coordinator")
    parser.add_argument(
        "--aggregator",
        nargs="+",
        default=[],
        metavar="FILE",
        help="configuration of each aggregator of this machine, in shard order",
    )


def _places(arguments: argparse.Namespace) -> Places:
    coordinator = read_config(arguments.coordinator, ()) if arguments.coordinator else None
    aggregators = tuple(load_config(AggregatorConfig, file, ()) for file in arguments.aggregator)
    if coordinator is None and not aggregators:
        raise ConfigError("nothing is named: give --coordinator FILE, --aggregator FILE or both")
    return Places(coordinator, aggregators)


def main_backup(arguments: argparse.Namespace) -> int:
    if arguments.verify:
        return _verify(arguments.folders)
    if len(arguments.folders) != 1:
        raise ConfigError("name one folder for the backup")
    made = make(arguments.folders[0], _places(arguments))
    print(describe(arguments.folders[0], made.manifest))
    if arguments.coordinator and arguments.aggregator:
        print(f"rounds waited {made.frozen_seconds:.2f} s")
    return _warn([made.manifest])


def _verify(folders: list[Path]) -> int:
    found = [manifest.read(folder) for folder in folders]
    for folder, each in zip(folders, found, strict=True):
        manifest.verify(folder, each)
        print(describe(folder, each))
    return _warn(found)


def _warn(found: list[Manifest]) -> int:
    lines = manifest.mismatches(found)
    print("\n".join(lines) if lines else "sound")
    return 1 if lines else 0


def main_restore(arguments: argparse.Namespace) -> int:
    found = restore(arguments.folder, _places(arguments), force=arguments.force)
    print(describe(arguments.folder, found))
    print("restored: start the aggregators, then the coordinator; what was revoked after the backup has to be")
    print("revoked again (`fedel certs revoke`)")
    return 0


def describe(folder: Path, found: Manifest) -> str:
    """For people."""
    num_bytes = sum(facts.num_bytes for facts in found.files.values())
    lines = [
        f"{folder}: made {found.made_at} by FedEL {found.fedel}, {len(found.files)} files,"
        f" {num_bytes / 1e6:.1f} MB: {', '.join(found.parts)}"
    ]
    for name, rounds in sorted(found.runs.items()):
        where = [] if rounds.database is None else [f"database at round {rounds.database}"]
        where += [f"{part} at {number}" for part, number in sorted(rounds.aggregators.items())]
        lines.append(f"  {name}: {f'{rounds.phase}, ' if rounds.phase else ''}{', '.join(where)}")
    return "\n".join(lines)
