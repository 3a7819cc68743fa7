"""``fedel preflight``: is this device ready to train? One line per check, green, or red with the remedy."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path

from fedel_edge.__main__ import load
from fedel_edge.config import AgentConfig
from fedel_edge.preflight.findings import BAD, GOOD, Finding
from fedel_edge.preflight.flight import preflight
from rich.console import Console
from rich.text import Text

from fedel.desk import user_code
from fedel.desk.local import read_job
from fedel.job import RunConfig
from fedel.security.tls import add_options

EXAMPLE = """example:
  fedel preflight --config configs/agent.toml
  fedel preflight --config configs/agent.toml --job examples/own.toml    # with the job's data set and model
exit code: 0 if nothing is red, 1 otherwise
"""
MARKS = {GOOD: ("✓", "green"), BAD: ("✗", "bold red")}
NO_MARK = ("-", "yellow")
WIDTH = 12


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "preflight",
        description="Check certificate, servers, clock, disk, memory, torch, data set and the time of a step.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the agent's configuration")
    parser.add_argument("--job", type=Path, metavar="FILE", help="a job that this device will train")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--json", action="store_true", help="for scripts")
    add_options(parser)
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    # We describe failures in our own words; gRPC's log lines would appear between them.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    config = load(str(arguments.config) if arguments.config else None, arguments.set)
    user_code.search(arguments.job)
    job = read_job(arguments.job, [])[0] if arguments.job else None
    findings = asyncio.run(_checked(config, job, None if arguments.json else Console(highlight=False)))
    red = [finding for finding in findings if finding.state == BAD]
    if arguments.json:
        print(json.dumps({"ok": not red, "findings": [asdict(finding) for finding in findings]}))
    return 1 if red else 0


async def _checked(config: AgentConfig, job: RunConfig | None, console: Console | None) -> list[Finding]:
    findings = []
    async for finding in preflight(config, job):
        findings.append(finding)
        if console is not None:
            show(finding, console)
    return findings


def show(finding: Finding, console: Console) -> None:
    mark, style = MARKS.get(finding.state, NO_MARK)
    console.print(Text.assemble((f"{mark} {finding.check:<{WIDTH}}", style), finding.said), soft_wrap=True)
    if finding.remedy:
        remedy = Text(" " * (WIDTH + 2) + finding.remedy, "bold" if finding.state == BAD else "")
        console.print(remedy, soft_wrap=True)
