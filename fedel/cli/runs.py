"""``fedel runs`` and ``fedel status``: the runs of a federation, and those in a directory of this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedel.cli.certs import add_certs
from fedel.cli.screen import PHASES, Screen
from fedel.cli.submit import control, follow, list_runs, look
from fedel.errors import ConfigError
from fedel.report import runs as run_directories
from fedel.report.refusals import reasons
from fedel.report.words import percent
from fedel.roles.gate import clean
from fedel.security.tls import Tls
from fedel.serialisation import to_json
from fedel.v1 import coordinator_pb2 as pb

ADDRESS = "127.0.0.1:7070"
NARROWEST_MESSAGE = 16
"""Letters in a line of a message."""
ACTIONS = {"pause": pb.RUN_ACTION_PAUSE, "resume": pb.RUN_ACTION_RESUME, "stop": pb.RUN_ACTION_STOP}


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = verbs.add_parser(
        "status",
        description="Show the state of a run, client by client; --follow updates it until the run is over.",
        epilog="example:\n  fedel status --coordinator server:7070 --follow\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("name", nargs="?", default="", help="name of the run (default: the newest)")
    status.add_argument("--coordinator", default=ADDRESS, metavar="HOST:PORT")
    add_certs(status)
    status.add_argument("--follow", action="store_true", help="update until the run is over")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=show_status)

    runs = verbs.add_parser(
        "runs",
        description="List the runs of a directory or a federation; pause, resume or stop one of a federation.",
        epilog="example:\n  fedel runs\n  fedel runs stop demo-fedel --coordinator server:7070\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runs.add_argument("action", nargs="?", choices=["list", *ACTIONS], default="list")
    runs.add_argument("name", nargs="?", default="", help="name of the run")
    runs.add_argument("--now", action="store_true", help="with stop: give the open round up")
    runs.add_argument("--coordinator", default="", metavar="HOST:PORT", help=f"a federation, such as {ADDRESS}")
    add_certs(runs)
    runs.add_argument("--out", type=Path, default=Path("runs"), help="directory of runs on this machine")
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    tls = Tls.of_user(arguments.certs)
    if arguments.action == "list":
        rows = (
            asyncio.run(_listed(arguments.coordinator, tls))
            if arguments.coordinator
            else _on_disk(arguments.out)
        )
        _show(rows, arguments.json)
        return 0
    if not arguments.name:
        raise ConfigError(f"`fedel runs {arguments.action}` needs the name of a run; `fedel runs` lists them")
    address = arguments.coordinator or ADDRESS
    action = ACTIONS[arguments.action]
    if arguments.now:
        if action != pb.RUN_ACTION_STOP:
            raise ConfigError(f"--now goes with `fedel runs stop`, not with {arguments.action}")
        action = pb.RUN_ACTION_STOP_NOW
    status = asyncio.run(control(address, arguments.name, action, tls))
    said = f"{status.run}: {PHASES.get(status.phase)}" + (f", {status.message}" if status.message else "")
    print(json.dumps(MessageToDict(status)) if arguments.json else clean(said))
    return 0


def show_status(arguments: argparse.Namespace) -> int:
    status = asyncio.run(_status(arguments, Console()))
    if arguments.json:
        print(json.dumps(MessageToDict(status, preserving_proto_field_name=True)))
    return 0


async def _status(arguments: argparse.Namespace, console: Console) -> pb.RunStatus:
    tls = Tls.of_user(arguments.certs)
    status = await look(arguments.coordinator, arguments.name, tls)
    if arguments.json:
        return status
    num_blocks = max((c.window.front_block for c in status.clients), default=1)
    screen = Screen(console, num_blocks)
    if not arguments.follow:
        screen.print(status)
        return status
    with screen:
        return await follow(arguments.coordinator, status.run, screen.show, tls)


async def _listed(address: str, tls: Tls) -> list[dict[str, Any]]:
    return [
        {
            "run": s.run,
            "strategy": json.loads(s.config_json).get("strategy", {}).get("name", "?"),
            "phase": PHASES.get(s.phase, "?"),
            "rounds": s.round_num,
            "num_rounds": s.num_rounds,
            "clients": s.num_connected,
            "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(s.created_at)),
            "message": s.message,
        }
        for s in await list_runs(address, tls)
    ]


def _on_disk(directory: Path) -> list[dict[str, Any]]:
    """One row per run; a run whose files cannot be read is listed with the reason."""
    found: list[dict[str, Any]] = []
    for path in run_directories.find(directory):
        try:
            run = run_directories.load(path)
        except (ConfigError, OSError) as error:
            facts = {"strategy": "?", "phase": "damaged", "rounds": None, "accuracy": None}
            found.append({"run": str(path), **facts, "report": False, "message": str(error)})
            continue
        accuracies = [accuracy for _, _, accuracy in run.accuracies()]
        found.append(
            {
                "run": str(path),
                "strategy": run.strategy,
                "phase": run.phase,
                "rounds": len(run.rounds),
                "accuracy": accuracies[-1] if accuracies else None,
                "report": (path / "report.html").exists(),
                "message": _message(run),
            }
        )
    return found


def _message(run: run_directories.StoredRun) -> str:
    """Why its accuracy means little, if it does."""
    if run.rounds and not any(record.num_updates for record in run.rounds):
        return (
            f"no update counted: {reasons(run.rounds)[0].text}" if reasons(run.rounds) else "no update counted"
        )
    if run.is_at_chance:
        return f"at chance for {run.num_classes} classes"
    return run.result.message if run.result else ""


def _show(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(to_json(rows))
        return
    if not rows:
        print("no runs yet; start one with `fedel demo` or `fedel run JOB.toml`")
        return
    columns = [column for column in rows[0] if column != "message" or any(row[column] for row in rows)]
    cells = [[clean(_cell(column, row[column])) for column in columns] for row in rows]
    table, console, width = Table(box=None, pad_edge=False), Console(), 0
    for column, texts in zip(columns, zip(*cells, strict=True), strict=True):
        # Names stay whole, so that they can be copied; a message takes the lines that it needs on a screen.
        table.add_column(column, no_wrap=column != "message", overflow="fold")
        longest = max(map(cell_len, (column, *texts)))
        width += 2 + (
            min(longest, NARROWEST_MESSAGE) if column == "message" and console.is_terminal else longest
        )
    for row_cells in cells:
        table.add_row(*map(Text, row_cells))
    console.width = max(console.width, width)
    console.print(table)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return percent(value) if column == "accuracy" else str(value)
