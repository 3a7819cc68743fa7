"""``python -m fedel_edge --config agent.toml``: run the agent until it is stopped by a signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedel import config as configuration
from fedel.errors import ConfigError, FedelError
from fedel.logs import set_up_logging
from fedel.security.tls import add_options
from fedel_edge.agent import Agent
from fedel_edge.certificates import adopt
from fedel_edge.config import AgentConfig
from fedel_edge.metrics_server import serve_metrics
from fedel_edge.notify import Systemd, report_to_systemd


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fedel agent", description="Take part in federated runs.")
    parser.add_argument("--config", metavar="FILE", help="TOML file; see configs/agent.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key")
    add_options(parser)
    args = parser.parse_args(arguments)
    try:
        return start(args.config, args.set)
    except FedelError as error:
        print(f"fedel agent: {error}", file=sys.stderr)
        return error.exit_code


def start(config_file: str | None, overrides: Sequence[str]) -> int:
    """Run an agent until SIGTERM or SIGINT; returns the exit code."""
    return run(load(config_file, overrides))


def load(path: str | None, overrides: Sequence[str] = ()) -> AgentConfig:
    """The configuration in a file, or the defaults, with overrides applied."""
    table = configuration.read(path) if path else {}
    for override in overrides:
        configuration.override_key(table, override)
    return configuration.parse(AgentConfig, table, path or "agent")


def run(config: AgentConfig) -> int:
    set_up_logging(config.log_level, config.log_json)
    _check_device(config)
    busy = asyncio.run(_run(config))
    if busy:
        _exit_under_torch("", 0)
    return 0


def _check_device(config: AgentConfig) -> None:
    """What torch does not have is said now, not with the first task; importing it takes seconds."""
    if config.device == "cpu":
        return
    from fedel_edge.preflight.findings import BAD
    from fedel_edge.preflight.machine import torch_there

    found = torch_there(config)
    if found.state == BAD:
        raise ConfigError(f"{found.said}: {found.remedy}")


async def _run(config: AgentConfig) -> bool:
    """Returns whether a thread is still busy with a training or a test that was given up."""
    with serve_metrics(config.http) as metrics:
        agent, systemd = Agent(adopt(config), metrics=metrics), Systemd()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            systemd.notify(STOPPING="1")
            agent.stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        async with report_to_systemd(systemd, lambda: agent.status):
            try:
                await agent.run()
            except FedelError as error:
                if not agent.busy:
                    raise
                _exit_under_torch(f"fedel agent: {error}", error.exit_code)
        return agent.busy


def _exit_under_torch(message: str, code: int) -> NoReturn:
    """A step of torch cannot be interrupted, and the interpreter must not be shut down while it runs."""
    if message:
        print(message, file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
