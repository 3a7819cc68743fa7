"""The ``fedel`` command: imports the module of the verb that is asked for, and runs it."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fedel import __version__
from fedel.errors import ConfigError, FedelError


class Verb(NamedTuple):
    """Where a verb is, and what it needs."""

    module: str
    """Module of this package; a few verbs that belong together share one."""
    extra: str
    """``pip install 'fedel[EXTRA]'`` brings what the verb imports."""
    help: str


VERBS = {
    "demo": Verb("demo", "desk", "a real federation on this machine: FedEL beside FedAvg, in minutes"),
    "run": Verb("run", "desk", "run a job: all of it on this machine, or on a federation"),
    "coordinator": Verb("serve", "server", "run the coordinator: plan rounds and send tasks to clients"),
    "aggregator": Verb("serve", "server", "run the aggregator: keep the model and fold updates into it"),
    "agent": Verb("serve", "edge", "run the agent: train on this device; install it as a service"),
    "preflight": Verb("preflight", "edge", "is this device ready to train?"),
    "certs": Verb("certs", "server", "certificates: the authority, servers, people, devices"),
    "status": Verb("runs", "desk", "the state of a run of a federation, client by client"),
    "runs": Verb("runs", "desk", "list runs; pause, resume or stop one"),
    "plan": Verb("plan", "desk", "what a job would do on a fleet: T_th, windows, seconds, bytes, memory"),
    "fleet": Verb("fleet", "desk", "list the agents of a federation; label, cordon, drain or profile them"),
    "report": Verb("report", "desk", "write the report of a run, or of several side by side"),
    "export": Verb("export", "desk", "write the model of a run, or an exit of it, for use elsewhere"),
    "exits": Verb("export", "desk", "what each early exit of a trained model costs and is worth"),
    "audit": Verb("audit", "server", "replay a run from the servers' disks; name what is damaged or missing"),
    "backup": Verb("backup", "server", "copy what the servers keep, as it was at one moment; runs go on"),
    "restore": Verb("backup", "server", "put a backup where the servers expect their files"),
    "chaos": Verb("chaos", "desk", "a drill: disturb a federation of its own, then audit what it made"),
    "bench": Verb("bench", "desk", "what FedEL costs on this machine, beside other systems and its limits"),
    "simulate": Verb("simulate", "desk", "a fleet of a hundred unequal devices, on a virtual clock"),
    "compare": Verb("compare", "desk", "simulate a job with several methods and seeds; one report"),
    "experiment": Verb(
        "experiment", "desk", "a table or figure of the paper: do the runs, compare the numbers"
    ),
    "profile": Verb("profile", "edge", "measure the training time of every tensor on this device"),
    "data": Verb("data", "edge", "list, get and check data sets"),
}
"""In the order of ``--help``."""


def parser(verb: str = "") -> argparse.ArgumentParser:
    """All verbs, but only one with its options: a server cannot import the modules of an agent's verbs."""
    root = argparse.ArgumentParser(
        prog="fedel", description="Federated learning for fleets of unequal devices."
    )
    root.add_argument("--version", action="version", version=f"fedel {__version__}")
    verbs = root.add_subparsers(dest="verb", metavar="VERB", required=True)
    asked = VERBS[verb].module if verb else ""
    if asked:
        importlib.import_module(f"fedel.cli.{asked}").add_parser(verbs)
    for name, each in VERBS.items():
        if each.module != asked:
            verbs.add_parser(name, help=each.help)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. An error that the user can repair ends with its own exit code and without a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words and words[0] in VERBS else ""
    try:
        with _sigterm_as_ctrl_c(verb) as sent:
            arguments = parser(verb).parse_args(words)
            return int(arguments.run(arguments) or 0)
    except ModuleNotFoundError as error:
        package = (error.name or "fedel").partition(".")[0]
        if not verb or package.startswith("fedel"):
            raise
        print(
            f"fedel {verb}: the package '{package}' is not installed in {sys.prefix}; "
            f"this brings everything the command needs: pip install 'fedel[{VERBS[verb].extra}]'",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    except FedelError as error:
        print(f"fedel {verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        if not sent:
            print(f"\n{str(stop) or 'stopped'}", file=sys.stderr)
            return 128 + signal.SIGINT
        print(
            f"\nfedel {verb}: stopped before its end: another process sent {sent[0]}, perhaps because of a time"
            " limit; start it again where it may take longer" + (f"; {stop}" if str(stop) else ""),
            file=sys.stderr,
        )
        return 128 + signal.SIGTERM
    except BrokenPipeError:
        return 0


@contextmanager
def _sigterm_as_ctrl_c(verb: str) -> Iterator[list[str]]:
    """SIGTERM ends a command as Ctrl-C does, and is then in the list. Servers have a way of their own."""
    sent: list[str] = []
    is_server = verb in VERBS and VERBS[verb].module == "serve"
    if is_server or threading.current_thread() is not threading.main_thread():
        yield sent
        return

    def stop(number: int, _frame: Any) -> None:
        sent.append(signal.Signals(number).name)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)  # where an event loop runs, it ends its tasks in order

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield sent
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
