"""``fedel data list|get|check``: which data sets there are, download them, verify them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedel.data.check import Health, check
from fedel.data.files import data_root
from fedel.data.registry import ENTRIES, entry
from fedel.data.store import get, is_present
from fedel.errors import DataError

if TYPE_CHECKING:
    from fedel.data.fetch import Progress as Report

_EXAMPLE = """example:
  fedel data get cifar10
  fedel data check cifar10
  fedel data get tiny-imagenet --from ~/Downloads/tiny-imagenet-200.zip"""
_PLAIN_SECONDS = 10.0
"""Without a terminal, a line appears this often while a download goes on."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser("data", epilog=_EXAMPLE, formatter_class=shape)
    verbs = parser.add_subparsers(dest="action", required=True, metavar="list|get|check")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--root", type=Path, help="directory of data sets ($FEDEL_DATA or ~/.cache/fedel/data)")

    listing = verbs.add_parser("list", parents=[common], help="known data sets, and which are on this machine")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list)

    getting = verbs.add_parser(
        "get", parents=[common], help="download a data set", epilog=_EXAMPLE, formatter_class=shape
    )
    getting.add_argument("name", metavar="NAME")
    getting.add_argument(
        "--from", dest="source", type=Path, metavar="FILE_OR_DIR", help="read it from here instead"
    )
    getting.add_argument("--force", action="store_true", help="even if it is here already")
    getting.set_defaults(run=run_get)

    checking = verbs.add_parser("check", parents=[common], help="count and verify a data set")
    checking.add_argument("name", metavar="NAME")
    checking.add_argument("--json", action="store_true", help="print JSON")
    checking.set_defaults(run=run_check)


def run_list(args: argparse.Namespace) -> int:
    root = data_root(args.root)
    if args.json:
        rows = [
            {
                "name": e.name,
                "task": e.task,
                "size": e.size,
                "licence": e.licence,
                "present": _presence(e.name, root) != "-",
                "source": e.source,
            }
            for e in ENTRIES.values()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    table = Table("name", "task", "size", "licence", "here", "from", box=None, padding=(0, 1, 0, 0))
    for e in ENTRIES.values():
        table.add_row(e.name, e.task, e.size, e.licence, _presence(e.name, root), e.registries)
    print(f"data sets in {root}")
    Console().print(table)
    return 0


def _presence(name: str, root: Path) -> str:
    if is_present(name, root):
        return "yes"
    return "by hand" if (root / name).is_dir() else "-"


def run_get(args: argparse.Namespace) -> int:
    started = time.monotonic()
    root = data_root(args.root)
    if (package := entry(args.name).package) and is_present(args.name, root):
        print(f"{args.name} comes with {package}, which is installed: there is nothing to get")
        return 0
    if args.source is None and not args.force and is_present(args.name, root):
        print(f"{args.name} is already in {root / args.name} (--force downloads it again)")
        return 0
    with show_progress() as report:
        place = get(args.name, root, report, args.source, args.force)
    print(f"{args.name} is in {place} ({time.monotonic() - started:.1f} s); verify it with `fedel data check`")
    return 0


def run_check(args: argparse.Namespace) -> int:
    health = check(args.name, data_root(args.root))
    if args.json:
        print(json.dumps(asdict(health), indent=1))
    else:
        _print_health(health)
    return DataError.exit_code if health.problems else 0


def _print_health(health: Health) -> None:
    print(f"{health.name}: {health.path}")
    print(f"  source   {health.source}" + (f"; {health.remark}" if health.remark else ""))
    if health.num_train:
        shape = " x ".join(map(str, health.sample_shape))
        print(f"  samples  {health.num_train:,} training + {health.num_test:,} test, {shape}")
    if health.num_users:
        print(f"  users    {health.num_users:,}")
    if health.per_class:
        print(f"  classes  {len(health.per_class)}: {_class_summary(health)}")
    if health.num_files:
        print(f"  files    {health.num_files:,} compared with their checksums")
    for problem in health.problems[:10]:
        print(f"  WRONG    {problem}", file=sys.stderr)
    if len(health.problems) > 10:
        print(f"  WRONG    ... and {len(health.problems) - 10} more", file=sys.stderr)
    print("  ok" if not health.problems else f"  {len(health.problems)} problem(s)")


def _class_summary(health: Health) -> str:
    counts = health.per_class or {}
    totals = sorted({train + test for train, test in counts.values()})
    if len(totals) == 1:
        return f"each {totals[0]:,} samples"
    return f"{totals[0]:,} to {totals[-1]:,} samples each"


@contextmanager
def show_progress() -> Iterator[Report]:
    """A bar on a terminal; without one, a line for every new piece of work and every ten seconds."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        yield _Bar(bars)


class _Bar:
    def __init__(self, bars: Progress) -> None:
        self._bars, self._what, self._task = bars, "", bars.add_task("starting", total=None)

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._bars.remove_task(self._task)
            self._what, self._task = what, self._bars.add_task(what, total=total or None)
        self._bars.update(self._task, completed=done)


class _Lines:
    def __init__(self) -> None:
        self._what, self._spoken = "", 0.0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what or now - self._spoken >= _PLAIN_SECONDS:
            amount = f" {done / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
            print(f"{what}{amount}", file=sys.stderr, flush=True)
            self._what, self._spoken = what, now
