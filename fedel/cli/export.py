"""``fedel export`` and ``fedel exits``: the model of a run for use elsewhere, and what each exit is worth."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedel.records import ExitRow
from fedel.serialisation import to_json

FORMATS = ("safetensors", "pt2", "onnx")
EXPORT_EXAMPLE = """example:
  fedel export runs/own                                   # tensors, for your own module's load_state_dict
  fedel export runs/own --format onnx --exit 3 --out small.onnx
"""
EXITS_EXAMPLE = """example:
  fedel exits runs/own
  fedel exits runs/own --batch 32 --json
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    _add_export(verbs)
    _add_exits(verbs)


def _add_export(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "export",
        description="Write the model of a run as one file that needs no FedEL: the tensors under the names of "
        "your own module (safetensors), or a program that takes images as they are stored, 0 to 255 (pt2, "
        "onnx). The function that makes the model is called; it is searched in the working directory.",
        epilog=EXPORT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run(parser)
    add = parser.add_argument
    add(
        "--exit",
        type=int,
        metavar="K",
        help="end after block K, a smaller model (default: what the run tested)",
    )
    add("--format", choices=FORMATS, default=FORMATS[0], help="default: safetensors")
    add(
        "--no-normalisation",
        action="store_true",
        help="pt2, onnx: take the input as the network was trained on",
    )
    add("--out", type=Path, metavar="FILE", help="default: RUN/RUN[-exitK].FORMAT")
    add("--json", action="store_true", help="print the file's metadata as JSON")
    parser.set_defaults(run=export)


def _add_exits(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "exits",
        description="One line per early exit of a trained model: accuracy on the test data, size, and time on "
        "this machine (one thread, median of repeats). Each exit is a smaller model: fedel export --exit K. "
        "The numbers are kept in RUN/exits.json, and fedel report shows them.",
        epilog=EXITS_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run(parser)
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="samples per call (default: 1)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=exits)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--round", default="best", metavar="ROUND", help="best, last, or a number (default: best)"
    )


def export(arguments: argparse.Namespace) -> int:
    from fedel.models import deploy, exported  # torch takes seconds to import

    model = deploy.load(arguments.directory, arguments.round)
    ending = f"-exit{arguments.exit}" if arguments.exit else ""
    default = model.run.path / f"{model.run.path.resolve().name}{ending}.{arguments.format}"
    file = arguments.out or default
    normalise = not arguments.no_normalisation
    metadata = exported.export(model, file, arguments.format, arguments.exit, normalise)
    if arguments.json:
        print(to_json({"file": str(file), "num_bytes": file.stat().st_size, **metadata}))
        return 0
    print(f"{file}: exit {metadata['exit']}, round {metadata['round']}, {_size(file.stat().st_size)}")
    print(f"input: {metadata['input']}")
    if metadata["exit_head"]:
        print(f"exit head: {metadata['exit_head']}")
    for name in ("mean", "std"):
        if name in metadata:
            print(f"{name}: {metadata[name]}")
    return 0


def exits(arguments: argparse.Namespace) -> int:
    from fedel.training.exit_table import measured  # torch takes seconds to import

    found = measured(arguments.directory, arguments.round, arguments.batch)
    if arguments.json:
        print(to_json(found))
        return 0
    print(_table(found.exits))
    if found.together_accuracy is not None:
        number = ", ".join(map(str, found.together))
        print(f"Exits {number} together, as the run tested them: {100 * found.together_accuracy:.2f} %.")
    samples = "one sample" if arguments.batch == 1 else f"{arguments.batch} samples"
    print(f"Round {found.round}. Time: on one thread of this machine, {samples} per call, median of repeats.")
    return 0


def _table(rows: Sequence[ExitRow]) -> str:
    cells = [("exit", "after block", "accuracy", "parameters", "size", "ms per sample")]
    cells += [
        (
            str(row.exit),
            row.block,
            f"{100 * row.accuracy:.2f} %",
            f"{row.num_parameters:,}",
            _size(row.num_bytes),
            f"{row.ms_per_sample:.3f}",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in cells)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
