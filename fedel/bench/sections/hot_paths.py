"""What FedEL does most often, in one process, each beside the least that could be done instead."""

from __future__ import annotations

from collections.abc import Iterator

from fedel.bench import hot_data, hot_decisions, hot_training
from fedel.bench.cpu import Case, least_cpu
from fedel.bench.page import table
from fedel.bench.section import Options, Row, Rows, Say, Section
from fedel.bench.workloads import workload

SIZE = "M"


def measure(options: Options, say: Say) -> Iterator[Row]:
    for case in _cases(options):
        work, floor = least_cpu(case.work, case.least, repeats=3 if options.quick else 5)
        say(f"  {case.what}: {work / floor:.2f} times '{case.floor}'")
        yield {
            "what": case.what,
            "about": case.about,
            "cpu_seconds": work,
            "floor": case.floor,
            "floor_cpu_seconds": floor,
        }


def _cases(options: Options) -> Iterator[Case]:
    size = workload(options.sizes[0] if len(options.sizes) == 1 else SIZE)
    yield from hot_data.cases(size, options.folder)
    yield from hot_decisions.cases(size)
    if not options.quick:
        yield hot_training.probe()


def show(rows: Rows) -> list[str]:
    lines = [
        [
            row["what"],
            row["about"],
            _milliseconds(row["cpu_seconds"]),
            f"{row['floor']}: {_milliseconds(row['floor_cpu_seconds'])}",
            f"{row['cpu_seconds'] / row['floor_cpu_seconds']:.2f}",
        ]
        for row in rows
    ]
    return [
        "CPU milliseconds of one process, the least of a few repeats; each beside a floor that does less.",
        "",
        *table(["what", "on", "CPU ms", "floor", "ratio"], lines),
    ]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def ratios(rows: Rows) -> dict[str, float]:
    return {f"{row['what']} / {row['floor']}": row["cpu_seconds"] / row["floor_cpu_seconds"] for row in rows}


SECTION = Section("hot-paths", "Hot paths", 30, measure, show, ratios=ratios, quick=True)
