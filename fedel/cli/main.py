"""The ``fedel`` command: finds the part that a verb names and runs it."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from fedel import __version__
from fedel.errors import FedelError

VERBS = (
    "demo",
    "run",
    "serve",
    "preflight",
    "certs",
    "runs",
    "report",
    "simulate",
    "experiment",
    "profile",
    "data",
)
"""One module of this package a verb (or a few verbs that belong together), in the order of ``--help``."""


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="fedel",
        description="Federated learning for fleets of unequal devices.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"fedel {__version__}")
    verbs = root.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        importlib.import_module(f"fedel.cli.{verb}").add_parser(verbs)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; errors for the user end with their own exit code, and no traceback."""
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except FedelError as error:
        print(f"fedel {arguments.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
