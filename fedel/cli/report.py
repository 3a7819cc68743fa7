"""``fedel report``: one page with pictures about a run, or about several side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "report",
        description="Write report.html and report.md from the files in the directory of a run.",
        epilog="example:\n  fedel report runs/demo-fedel --compare runs/demo-fedavg --tensorboard tb\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", type=Path, help="directory of a run")
    parser.add_argument(
        "--compare", type=Path, nargs="+", default=[], metavar="DIR", help="other runs to show beside it"
    )
    parser.add_argument("--out", type=Path, help="where to write it (default: the first directory)")
    parser.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="also write event files for TensorBoard"
    )
    parser.add_argument("--json", action="store_true", help="print the table of figures as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    from fedel.report import page, runs, tensorboard  # draws with matplotlib, which takes a second to import

    found = [runs.load(path) for path in (arguments.directory, *arguments.compare)]
    target = arguments.out or arguments.directory
    target.mkdir(parents=True, exist_ok=True)
    written = page.write(found, target)
    if arguments.tensorboard:
        for run in found:
            tensorboard.write(run, arguments.tensorboard)
    if arguments.json:
        print(json.dumps([dict(zip(page.COLUMNS, row, strict=True)) for row in page.rows(found)]))
    else:
        for sentence in page.verdicts(found):
            print(sentence)
        print(f"report: {written}")
        if arguments.tensorboard:
            print(f"event files: tensorboard --logdir {arguments.tensorboard}")
    return 0
