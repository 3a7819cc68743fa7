"""``python -m fedel_aggregator --config aggregator.toml --set max_uploads=8``"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress

from fedel_services.runtime import until_told_to_stop

from fedel import config
from fedel.errors import FedelError
from fedel.logs import set_up_logging
from fedel.security.tls import add_options
from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serving

_MALLOC = {
    # One heap: glibc would give each thread its own, and what one of them frees serves no other.
    "arena_max": (-8, 1),
    # What a round freed serves the next one, instead of being given back and faulted in again.
    "mmap_threshold": (-3, 32 << 20),
    "trim_threshold": (-1, 512 << 20),
}


def bound_memory() -> None:
    """Tell glibc how to keep memory flat; elsewhere do nothing."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for option, value in _MALLOC.values():
            libc.mallopt(option, value)


def read_config(path: str | None, overrides: Sequence[str]) -> AggregatorConfig:
    table = config.read(path) if path else {}
    for override in overrides:
        config.override_key(table, override)
    return config.parse(AggregatorConfig, table, path or "--set")


async def serve(settings: AggregatorConfig) -> None:
    async with serving(settings):
        await until_told_to_stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fedel aggregator",
        description="Keep the model and fold updates into it.",
        epilog="example: fedel aggregator --set listen=0.0.0.0:7071 --set data_dir=/var/lib/fedel",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with the keys of AggregatorConfig")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override one key")
    add_options(parser)
    options = parser.parse_args(arguments)
    bound_memory()
    try:
        settings = read_config(options.config, options.set)
        set_up_logging(settings.log_level, settings.log_json)
        asyncio.run(serve(settings))
    except FedelError as error:
        print(f"fedel aggregator: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
