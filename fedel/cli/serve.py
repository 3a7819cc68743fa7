"""``fedel coordinator``, ``fedel aggregator`` and ``fedel agent``: the processes of a federation."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from fedel.cli.install import add_actions
from fedel.security.tls import add_options

PROCESSES = {
    "coordinator": ("fedel_coordinator.__main__", "plan rounds and tell clients what to train"),
    "aggregator": ("fedel_aggregator.__main__", "keep the model and fold updates into the next one"),
    "agent": ("fedel_edge.__main__", "train on this device"),
}


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, (_, what) in PROCESSES.items():
        parser = verbs.add_parser(
            name,
            help=f"run the {name}: {what}",
            description=f"Run the {name}: {what}. It goes on until SIGTERM or Ctrl-C, then finishes cleanly.",
            epilog=f"example:\n  fedel {name} --config configs/{name}.toml\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--config", type=Path, help=f"TOML file; configs/{name}.toml explains every key")
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting"
        )
        add_options(parser)
        parser.set_defaults(run=main, process=name)
        if name == "agent":
            add_actions(parser)


def main(arguments: argparse.Namespace) -> int:
    module, _ = PROCESSES[arguments.process]
    options = ["--config", str(arguments.config)] if arguments.config else []
    for override in arguments.set:
        options += ["--set", override]
    return int(importlib.import_module(module).main(options) or 0)
