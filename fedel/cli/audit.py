"""``fedel audit``: replay a run from what its servers keep on disk, and name what is damaged or missing."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from fedel_coordinator.config import DATABASE_VARIABLE

from fedel.audit.audit import Audit, Sources, audit
from fedel.errors import ConfigError
from fedel.serialisation import to_json

EXAMPLE = """example:
  fedel audit night-1 --aggregator aggregator-data --database sqlite:///coordinator.db
  fedel audit night-1 --aggregator a0 a1 --database postgresql+psycopg://me@db/fedel --runs-dir runs --json

exit code: 0 if the run is sound, 1 if something was found
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "audit",
        description="Compute every version of a run again from the updates that are kept, compare the bits, "
        "verify all checksums, and hold versions, records and windows against each other. Nothing is changed. "
        "Aggregators keep updates only with keep_updates (docs/audit.md).",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="RUN", help="name of the run")
    parser.add_argument(
        "--aggregator",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="data_dir of each aggregator, which must not run",
    )
    parser.add_argument(
        "--database",
        default=os.environ.get(DATABASE_VARIABLE, ""),
        metavar="URL",
        help=f"the coordinator's database_url (default: {DATABASE_VARIABLE})",
    )
    parser.add_argument("--runs-dir", type=Path, metavar="DIR", help="the coordinator's runs_dir")
    parser.add_argument("--run-code", action="store_true", help="run the method that came with the job")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    directory = arguments.runs_dir / arguments.name if arguments.runs_dir else None
    if not (arguments.aggregator or arguments.database or directory):
        raise ConfigError("nothing to look at: name --aggregator, --database or --runs-dir, best all three")
    places = tuple(arguments.aggregator), arguments.database, directory
    result = audit(Sources(arguments.name, *places, arguments.run_code))
    print(to_json(result) if arguments.json else describe(result))
    return 0 if result.sound else 1


def describe(result: Audit) -> str:
    """For people."""
    versions = f"{result.num_recomputed} of {result.newest_version}"
    hint = "" if result.num_updates else "; no updates are kept (keep_updates in aggregator.toml)"
    lines = [
        f"run '{result.run}': {result.num_rounds} records, {result.num_aggregators} aggregators",
        f"  {result.num_versions} versions on disk, {result.num_tensors} checksums verified",
        f"  {versions} versions computed again from {result.num_updates} updates, with the same bits{hint}",
        *(f"  {finding}" for finding in result.findings),
        "sound" if result.sound else f"{len(result.findings)} findings",
    ]
    return "\n".join(lines)
