"""``fedel report``: one page with pictures about a run, or about several side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from fedel.errors import ConfigError
from fedel.serialisation import to_json

EXAMPLE = """example:
  fedel report runs/demo-fedel --compare runs/demo-fedavg --tensorboard tb
  fedel report runs/a --compare runs/b --csv csv --figures figures --format pdf
"""
FORMATS = ("svg", "pdf", "png")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "report",
        description="Write report.html and report.md from the files in the directory of a run.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("directory", type=Path, help="directory of a run")
    add("--compare", type=Path, nargs="+", default=[], metavar="DIR", help="other runs to show beside it")
    add("--out", type=Path, metavar="DIR", help="where to write it (default: the first directory)")
    add("--csv", type=Path, metavar="DIR", help="also write a CSV file of each run, one row per round")
    add("--figures", type=Path, metavar="DIR", help="also write each picture as a file")
    add("--format", choices=FORMATS, help="of the files of --figures (default: svg)")
    add("--tensorboard", type=Path, metavar="DIR", help="also write event files for TensorBoard")
    add("--exits", action="store_true", help="first measure the early exits of the models (as fedel exits)")
    add("--json", action="store_true", help="print the figures of the runs as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    if arguments.format and not arguments.figures:
        raise ConfigError("--format is that of the files of --figures: name their directory, --figures DIR")
    # matplotlib takes a second to import
    from fedel.report import page, runs, tables, tensorboard
    from fedel.report.figures import figures
    from fedel.report.verdicts import verdicts

    if arguments.exits:
        from fedel.training.exit_table import measured  # torch takes seconds to import

        for path in (arguments.directory, *arguments.compare):
            measured(path)
    found = [runs.load(path) for path in (arguments.directory, *arguments.compare)]
    target = arguments.out or arguments.directory
    target.mkdir(parents=True, exist_ok=True)
    written = [f"report: {page.write(found, target)}"]
    if arguments.csv:
        written.append(f"CSV: {', '.join(map(str, tables.write_csv(found, arguments.csv)))}")
    if arguments.figures:
        pictures = page.save_pictures(found, arguments.figures, arguments.format or FORMATS[0])
        written.append(f"pictures: {len(pictures)} files in {arguments.figures}")
    if arguments.tensorboard:
        for run in found:
            tensorboard.write(run, arguments.tensorboard)
        written.append(f"event files: tensorboard --logdir {arguments.tensorboard}")
    if arguments.json:
        print(to_json([figures(run) for run in found]))
        return 0
    for line in (*verdicts(found), *written):
        print(line)
    return 0
