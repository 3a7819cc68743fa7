"""The least that this machine can do with the bytes of an update: the floors that others are compared with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fedel.bench.page import table
from fedel.bench.section import Options, Row, Rows, Say, Section

NUM_BYTES = 64 << 20
REPEATS = 5


def least_cpu(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """CPU seconds of the fastest of a few repeats: other work on the machine only adds to it."""
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def measure(_options: Options, _say: Say) -> Iterator[Row]:
    source = np.ones(NUM_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    for what, work in {
        "memcpy": lambda: np.copyto(target, source),
        "accumulate": lambda: np.add(target, source, out=target),
    }.items():
        yield {"what": what, "bytes": NUM_BYTES, "cpu_seconds": least_cpu(work)}


def show(rows: Rows) -> list[str]:
    lines = [[row["what"], f"{row['bytes'] / row['cpu_seconds'] / 1e9:.1f}"] for row in rows]
    return table(["floor", "GB per CPU second"], lines)


SECTION = Section("floors", "What the machine can do", 10, measure, show, quick=True)
