"""``fedel compare``: one job, several methods, the same seeds for each; one report with means and intervals."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from fedel.cli.experiment import words
from fedel.errors import ConfigError
from fedel.serialisation import to_json

EXAMPLE = """example:
  fedel compare configs/simulation.toml --methods fedel,fedavg,heterofl --seeds 3
  fedel compare configs/simulation.toml --methods fedel,fedavg --set rounds.num_rounds=10 --csv
  fedel compare configs/simulation.toml --methods fedel,fedavg --figures --format pdf,png --jobs 2
"""
FORMATS = ("svg", "pdf", "png")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "compare",
        description="Simulate a job with several methods, each with the same seeds. The report has means and "
        "95 % intervals at equal time and after equal rounds. Runs that are done are used again, so the same "
        "command goes on after Ctrl-C.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("job", type=Path, help="TOML file of a simulation; its [strategy] is for the method that it names")
    add(
        "--methods",
        type=words,
        required=True,
        metavar="A,B",
        help="methods by name, or package.module:Class for your own; leads are over the first",
    )
    add("--seeds", type=int, default=3, metavar="N", help="the job's seed and those after it (default: 3)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    add("--jobs", type=int, default=0, metavar="N", help="runs at the same time (default: one per core)")
    add(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="processes that train in each run (default: its cores)",
    )
    add("--executor", choices=("serial", "processes", "ray"), default="processes", help="default: processes")
    add("--out", type=Path, default=Path(), metavar="DIR", help="directory (default: runs/compare-JOB)")
    add("--csv", action="store_true", help="also write csv/RUN.csv, one row per round")
    add("--figures", action="store_true", help="also write each picture as a file, in figures/")
    add("--format", type=words, default=(), metavar="A,B", help=f"of --figures: {', '.join(FORMATS)}")
    add("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    if arguments.format and not arguments.figures:
        raise ConfigError("--format is that of the files of --figures: give --figures, too")
    if wrong := [each for each in arguments.format if each not in FORMATS]:
        raise ConfigError(f"--format {wrong[0]} is not one of: {', '.join(FORMATS)}")
    from fedel.api.comparison import compare  # torch takes seconds to import
    from fedel.report.figures import figures

    found = compare(
        arguments.job,
        arguments.methods,
        arguments.seeds,
        overrides=arguments.set,
        out="" if arguments.out == Path() else arguments.out,
        jobs=arguments.jobs,
        workers=arguments.workers,
        executor=arguments.executor,
        progress=Console(stderr=True),
    )
    written = [f"report: {found.report()}"]
    if arguments.csv:
        written.append(f"CSV: {len(found.save_csv(found.path / 'csv'))} files in {found.path / 'csv'}")
    if arguments.figures:
        files = found.save_figures(found.path / "figures", *(arguments.format or FORMATS[:1]))
        written.append(f"pictures: {len(files)} files in {found.path / 'figures'}")
    failed = [f"failed: {name}: {why}" for name, why in found.failed.items()]
    if arguments.json:
        runs = {
            label: [figures(each.stored) for each in each_seed] for label, each_seed in found.results.items()
        }
        said = {
            "methods": found.methods,
            "runs": runs,
            "sentences": found.sentences,
            "failed": dict(found.failed),
        }
        print(to_json({**said, "report": str(found.path / "report.html")}))
    else:
        for line in (*found.sentences, "", found.table(), "", *failed, *written):
            print(line)
    return 1 if failed else 0
