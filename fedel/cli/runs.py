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
from fedel.cli.run_actions import ACTIONS, ADDRESS
from fedel.desk.screen import PHASES, Screen
from fedel.desk.submit import follow, list_runs, look, overview
from fedel.errors import ConfigError
from fedel.report import runs as run_directories
from fedel.report.refusals import reasons
from fedel.report.words import percent, plural
from fedel.roles.gate import MAX_NAME, clean
from fedel.security.tls import Tls
from fedel.serialisation import to_json
from fedel.v1 import coordinator_pb2 as pb

EXAMPLE = """example:
  fedel runs
  fedel runs --coordinator server:7070
  fedel runs stop night --why "wrong data" --coordinator server:7070
  fedel runs fetch night --coordinator server:7070          # its result, records and model, into runs/night
  fedel runs delete --older-than 30d --dry-run --coordinator server:7070
"""
NARROWEST_MESSAGE = 16
"""Letters in a line of a message."""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    status = verbs.add_parser(
        "status",
        description="Show the state of a run, client by client; --follow updates it until the run is over.",
        epilog="example:\n  fedel status --coordinator server:7070 --follow\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("name", nargs="?", default="", help="name of the run (default: the newest active one)")
    status.add_argument("--coordinator", default=ADDRESS, metavar="HOST:PORT")
    add_certs(status)
    status.add_argument("--follow", action="store_true", help="update until the run is over")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=show_status)

    runs = verbs.add_parser(
        "runs",
        description="List the runs of a directory or a federation. Pause, resume or stop runs of a federation;"
        " fetch their results; delete those that are over.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    runs.add_argument("action", nargs="?", choices=["list", *ACTIONS], default="list")
    runs.add_argument("names", nargs="*", metavar="NAME", help="names of runs")
    runs.add_argument("--now", action="store_true", help="with stop: give the open round up")
    runs.add_argument("--why", default="", metavar="TEXT", help="with pause and stop: the reason")
    runs.add_argument(
        "--older-than",
        default="",
        metavar="TIME",
        help="with delete: all that ended longer ago: 30d, 12h",
    )
    runs.add_argument("--dry-run", action="store_true", help="with delete: only tell what would be deleted")
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
    return ACTIONS[arguments.action](arguments, tls)


def show_status(arguments: argparse.Namespace) -> int:
    status = asyncio.run(_status(arguments, Console()))
    if arguments.json:
        found = MessageToDict(status, preserving_proto_field_name=True) if status else {}
        print(json.dumps(found))
    return 0


async def _status(arguments: argparse.Namespace, console: Console) -> pb.RunStatus | None:
    tls = Tls.of_user(arguments.certs)
    status = await look(arguments.coordinator, arguments.name, tls)
    if arguments.json:
        return status
    if status is None:
        print(no_runs(await overview(arguments.coordinator, tls)))
        return None
    screen = Screen(console)
    if not arguments.follow:
        screen.print(status)
        return status
    with screen:
        return await follow(arguments.coordinator, status.run, screen.show, tls)


def no_runs(found: pb.ListRunsResponse) -> str:
    """What there is to say about a federation without runs."""
    more = [f"{found.num_agents - len(found.agents)} more"] if found.num_agents > len(found.agents) else []
    named = ", ".join([*(clean(name, MAX_NAME) for name in found.agents), *more])
    here = f"{plural(found.num_agents, 'agent')} connected" + (f": {named}" if named else "")
    return f"no runs yet; {here}. `fedel run JOB.toml --coordinator HOST:PORT` starts one"


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
