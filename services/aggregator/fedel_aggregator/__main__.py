"""``python -m fedel_aggregator --config aggregator.toml --set max_uploads=8``"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress

from fedel_services import runtime
from fedel_services.runtime import load_config, run_service

from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve

_MALLOC = {
    # One heap: glibc would give each thread its own, and memory freed in one cannot be used by another.
    "arena_max": (-8, 1),
    # Memory that a round freed serves the next one, instead of going back to the system.
    "mmap_threshold": (-3, 32 << 20),
    "trim_threshold": (-1, 512 << 20),
}


def limit_memory() -> None:
    """Make glibc keep memory flat; does nothing where there is no glibc."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in _MALLOC.values():
            libc.mallopt(option, value)


def start(config_file: str | None, overrides: Sequence[str]) -> int:
    """Run an aggregator until SIGTERM or SIGINT; returns the exit code."""
    limit_memory()
    config = load_config(AggregatorConfig, config_file, overrides)
    return run_service(config, serve(config))


def main(arguments: Sequence[str] | None = None) -> int:
    return runtime.main("aggregator", start, arguments)


if __name__ == "__main__":
    sys.exit(main())
