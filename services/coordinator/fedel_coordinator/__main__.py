"""``python -m fedel_coordinator --config coordinator.toml --set runs_dir=runs``"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from fedel_services.runtime import until_told_to_stop

from fedel import config
from fedel.errors import FedelError
from fedel.logs import set_up_logging
from fedel.security.tls import add_options
from fedel_coordinator.config import DATABASE_VARIABLE, TOKEN_VARIABLE, CoordinatorConfig
from fedel_coordinator.server import serving


def read_config(path: str | None, overrides: Sequence[str]) -> CoordinatorConfig:
    table = config.read(path) if path else {}
    for override in overrides:
        config.override_key(table, override)
    settings = config.parse(CoordinatorConfig, table, path or "--set")
    return replace(
        settings,
        database_url=os.environ.get(DATABASE_VARIABLE) or settings.database_url,
        http_token=os.environ.get(TOKEN_VARIABLE) or settings.http_token,
    )


async def serve(settings: CoordinatorConfig) -> None:
    async with serving(settings):
        await until_told_to_stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fedel coordinator",
        description="Plan rounds, tell clients what to train, and keep where each of them stands.",
        epilog="example: fedel coordinator --set listen=0.0.0.0:7070 --set 'aggregators=[\"10.0.0.2:7071\"]'",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with the keys of CoordinatorConfig")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override one key")
    add_options(parser)
    options = parser.parse_args(arguments)
    try:
        settings = read_config(options.config, options.set)
        set_up_logging(settings.log_level, settings.log_json)
        asyncio.run(serve(settings))
    except FedelError as error:
        print(f"fedel coordinator: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
