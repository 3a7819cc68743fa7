"""What ``fedel runs`` does to runs of a federation: pause, resume, stop, fetch, delete."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Callable

from google.protobuf.json_format import MessageToDict
from rich.console import Console

from fedel.desk.screen import PHASES
from fedel.desk.submit import control, delete
from fedel.errors import ConfigError
from fedel.report.words import plural
from fedel.roles.gate import clean
from fedel.security.tls import Tls
from fedel.v1 import coordinator_pb2 as pb

ADDRESS = "127.0.0.1:7070"
CONTROLS = {"pause": pb.RUN_ACTION_PAUSE, "resume": pb.RUN_ACTION_RESUME, "stop": pb.RUN_ACTION_STOP}
SECONDS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0}


def change(arguments: argparse.Namespace, tls: Tls) -> int:
    """Pause, resume or stop."""
    action = CONTROLS[arguments.action]
    if arguments.now:
        if action != pb.RUN_ACTION_STOP:
            raise ConfigError(f"--now goes with `fedel runs stop`, not with {arguments.action}")
        action = pb.RUN_ACTION_STOP_NOW
    for name in _names(arguments):
        status = asyncio.run(control(_address(arguments), name, action, tls, arguments.why))
        print(json.dumps(MessageToDict(status)) if arguments.json else clean(what_follows(status, action)))
    return 0


def what_follows(status: pb.RunStatus, action: pb.RunAction.ValueType) -> str:
    """What becomes of a run, for people.

    >>> running = pb.RunStatus(run="r4", phase=pb.RUN_PHASE_RUNNING, round_num=65, round_phase="train")
    >>> what_follows(running, pb.RUN_ACTION_STOP)
    'r4 stops after round 66'
    """
    is_open = status.round_phase not in ("", "waiting")
    if action == pb.RUN_ACTION_STOP and status.phase == pb.RUN_PHASE_RUNNING:
        return f"{status.run} stops " + (f"after round {status.round_num + 1}" if is_open else "now")
    later = f", after round {status.round_num + 1}" if status.phase == pb.RUN_PHASE_PAUSED and is_open else ""
    message = f": {status.message}" if status.message else ""
    return f"{status.run}: {PHASES.get(status.phase)}{later}{message}"


def fetch(arguments: argparse.Namespace, tls: Tls) -> int:
    """Bring results here; of a run that is not over, when it ends."""
    from fedel.api.fetching import fetched, how_to_come_back

    address = _address(arguments)
    for name in _names(arguments):
        place = arguments.out / name
        try:
            status = asyncio.run(fetched(address, name, place, tls, Console(stderr=True)))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; {how_to_come_back(name, address, tls.dir)}") from None
        if arguments.json:
            print(json.dumps({"run": name, "path": str(place), "phase": PHASES.get(status.phase)}))
        else:
            print(clean(f"{place}: run '{name}', {PHASES.get(status.phase)}, version {status.model_version}"))
    return 0


def remove(arguments: argparse.Namespace, tls: Tls) -> int:
    """Delete runs that are over, and print what was deleted."""
    older = seconds_of(arguments.older_than) if arguments.older_than else None
    names = _names(arguments) if older is None else arguments.names
    found = asyncio.run(delete(_address(arguments), names, older, arguments.dry_run, tls))
    if arguments.json:
        print(json.dumps([MessageToDict(each, always_print_fields_with_no_presence=True) for each in found]))
        return 0
    for each in found:
        print(clean(what_went(each, arguments.dry_run)))
    if not found:
        print(f"no run ended more than {arguments.older_than} ago: nothing to delete")
    return 0


def what_went(deleted: pb.DeletedRun, dry_run: bool) -> str:
    """One line about a run that was deleted.

    >>> what_went(pb.DeletedRun(run="r4", found=True, num_rounds=66, aggregator_bytes=12_300_000), False)
    'deleted r4: 66 rounds, 12.30 MB at the aggregators, 0.00 MB in its folder at the coordinator'
    """
    if not (deleted.found or deleted.aggregator_bytes):
        return f"{deleted.run}: there is no such run, and nothing of it to delete; `fedel runs` lists all"
    verb = "would delete" if dry_run else "deleted"
    rounds = plural(deleted.num_rounds, "round") if deleted.found else "no run, only its model"
    return (
        f"{verb} {deleted.run}: {rounds}, {deleted.aggregator_bytes / 1e6:.2f} MB at the aggregators,"
        f" {deleted.folder_bytes / 1e6:.2f} MB in its folder at the coordinator"
    )


def seconds_of(text: str) -> float:
    """A time as people write it.

    >>> seconds_of("30d"), seconds_of("1.5h")
    (2592000.0, 5400.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([dhms])", text.strip())
    if not found:
        raise ConfigError(f"--older-than {text}: write a number and d, h, m or s, such as 30d or 12h")
    return float(found[1]) * SECONDS[found[2]]


def _names(arguments: argparse.Namespace) -> list[str]:
    if not arguments.names:
        raise ConfigError(f"`fedel runs {arguments.action}` needs the name of a run; `fedel runs` lists them")
    return list(arguments.names)


def _address(arguments: argparse.Namespace) -> str:
    return arguments.coordinator or ADDRESS


ACTIONS: dict[str, Callable[[argparse.Namespace, Tls], int]] = {
    **dict.fromkeys(CONTROLS, change),
    "fetch": fetch,
    "delete": remove,
}
