"""``fedel coordinator``, ``fedel aggregator`` and ``fedel agent``: the processes of a federation."""

from __future__ import annotations

import argparse
import importlib

from fedel.cli.install import add_actions
from fedel.security.tls import add_options

PROCESSES = {
    "coordinator": ("fedel_coordinator.__main__", "plan rounds and send each client its tasks"),
    "aggregator": ("fedel_aggregator.__main__", "keep the model and fold updates into the next one"),
    "agent": ("fedel_edge.__main__", "train on this device"),
}
"""Module and purpose of each; a module is imported only when its process starts here."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, (_, purpose) in PROCESSES.items():
        parser = verbs.add_parser(
            name,
            help=f"run the {name}: {purpose}",
            description=f"Run the {name}: {purpose}. It runs until SIGTERM or Ctrl-C, then stops gracefully.",
            epilog=f"example:\n  fedel {name} --config configs/{name}.toml\n",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--config", metavar="FILE", help=f"TOML file, such as configs/{name}.toml")
        parser.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting"
        )
        add_options(parser)
        parser.set_defaults(run=main, process=name)
        if name == "agent":
            add_actions(parser)


def main(arguments: argparse.Namespace) -> int:
    module, _ = PROCESSES[arguments.process]
    return int(importlib.import_module(module).start(arguments.config, arguments.set))
