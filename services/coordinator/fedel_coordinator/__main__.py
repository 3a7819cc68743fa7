"""``python -m fedel_coordinator --config coordinator.toml --set runs_dir=runs``"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from fedel_services import heap, runtime
from fedel_services.runtime import load_config, run_service

from fedel_coordinator.config import DATABASE_VARIABLE, TOKEN_VARIABLE, VIEW_TOKEN_VARIABLE, CoordinatorConfig
from fedel_coordinator.server import serve


def read_config(path: str | None, overrides: Sequence[str]) -> CoordinatorConfig:
    """The settings, with the secrets that the environment holds."""
    config = load_config(CoordinatorConfig, path, overrides)
    return replace(
        config,
        database_url=os.environ.get(DATABASE_VARIABLE) or config.database_url,
        http_token=os.environ.get(TOKEN_VARIABLE) or config.http_token,
        http_view_token=os.environ.get(VIEW_TOKEN_VARIABLE) or config.http_view_token,
    )


def start(config_file: str | None, overrides: Sequence[str]) -> int:
    """Run a coordinator until SIGTERM or SIGINT; returns the exit code."""
    heap.one_heap()
    config = read_config(config_file, overrides)
    return run_service(config, serve(config))


def main(arguments: Sequence[str] | None = None) -> int:
    return runtime.main("coordinator", start, arguments)


if __name__ == "__main__":
    sys.exit(main())
