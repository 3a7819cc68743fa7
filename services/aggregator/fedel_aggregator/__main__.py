"""``python -m fedel_aggregator --config aggregator.toml --set max_uploads=8``"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedel_services import heap, runtime
from fedel_services.runtime import load_config, run_service

from fedel_aggregator.config import AggregatorConfig
from fedel_aggregator.server import serve


def start(config_file: str | None, overrides: Sequence[str]) -> int:
    """Run an aggregator until SIGTERM or SIGINT; returns the exit code."""
    heap.one_heap()
    heap.keep_freed()
    config = load_config(AggregatorConfig, config_file, overrides)
    return run_service(config, serve(config))


def main(arguments: Sequence[str] | None = None) -> int:
    return runtime.main("aggregator", start, arguments)


if __name__ == "__main__":
    sys.exit(main())
