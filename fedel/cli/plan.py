"""``fedel plan``: what the first rounds of a job would be on the agents of a federation; nothing is trained."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedel import plugins
from fedel.cli.agent_rows import aligned, amount
from fedel.cli.certs import add_certs
from fedel.cli.run_actions import ADDRESS
from fedel.desk.submit import plan_run
from fedel.errors import ConfigError
from fedel.roles.gate import clean
from fedel.security.tls import Tls

EXAMPLE = """example:
  fedel plan examples/own.toml --coordinator server:7070
  fedel plan examples/own.toml --set strategy.name=fedavg --json
"""
WAIT_SECONDS = 120.0
COLUMNS = ("client", "windows", "steps", "train", "down", "up", "memory", "note")


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "plan",
        description="Plan a job on the agents of a federation, without a run. Every agent that the job selects"
        " builds the model and measures it, unless it has done so before; then you see T_th, and of each client"
        " the windows of its first three rounds, and seconds, bytes and memory of the first one.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", type=Path, help="TOML file, as for `fedel run`: docs/job.md")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )
    parser.add_argument("--coordinator", default=ADDRESS, metavar="HOST:PORT", help=f"default: {ADDRESS}")
    add_certs(parser)
    parser.add_argument(
        "--code", action="append", default=[], metavar="PATH", help="your own code, as for `fedel run`"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help="for agents that measure or work",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    from fedel.api.code import packed, signed
    from fedel.api.federation import first_model  # with torch, which takes seconds to import
    from fedel.api.jobs import read
    from fedel.job import RunConfig
    from fedel.job_code import JobCode

    made = read(arguments.job, overrides=arguments.set)
    made.table.pop("fleet", None)
    bundle, tls = packed(made, arguments.code), Tls.of_user(arguments.certs)
    job = replace(RunConfig.parse(made.table, made.where), bundle=bundle.sha256 if bundle else "")
    with made.objects.known(), plugins.only(None, JobCode(bundle, "", "desk") if bundle else None):
        _, spec, _ = first_model(job)
    code = signed(bundle, job, tls) if bundle else None
    text = asyncio.run(plan_run(arguments.coordinator, job, spec, arguments.wait, tls, code))
    if arguments.json:
        print(text)
        return 0
    plan = json.loads(text)
    for line in lines(plan, job.clients):
        print(line)
    if plan["forecast"] is None:
        raise ConfigError("no agent can take part in this job")
    return 0


def lines(plan: dict[str, Any], selector: str = "") -> list[str]:
    """The plan for people."""
    found, said = plan["forecast"], []
    if found is not None:
        said.append(
            f"T_th {1000 * found['budget_seconds']:.3g} ms per step ({found['scope']}); a round may close after"
            f" {found['deadline_seconds']:.0f} s"
        )
        said += aligned([COLUMNS, *map(_row, found["clients"])])
    for out in plan["left_out"]:
        about = f" ({selector})" if selector and out["why"].endswith("job's clients") else ""
        said.append(clean(f"without {out['client']}: it {out['why']}{about}"))
    return said


def _row(client: dict[str, Any]) -> list[str]:
    if not client["windows"]:
        return [clean(client["client"]), *["-"] * (len(COLUMNS) - 2), "no task in the first rounds"]
    windows = [f"{w['end']}-{w['front']}" if w else "whole" for w in client["windows"]]
    down, up = client["download_seconds"], client["upload_seconds"]
    memory = client["memory_bytes"]
    return [
        clean(client["client"]),
        " ".join(windows),
        str(client["num_steps"]),
        f"{client['train_seconds']:.2f} s",
        amount(client["bytes_down"]) + ("" if down is None else f", {down:.2f} s"),
        amount(client["bytes_up"]) + ("" if up is None else f", {up:.2f} s"),
        "-" if memory is None else amount(memory),
        "; ".join(_notes(client)) or "-",
    ]


def _notes(client: dict[str, Any]) -> list[str]:
    """What does not fit, and why."""
    notes, limit, memory = [], client["memory_limit_bytes"], client["memory_bytes"]
    if client["over_budget"]:
        notes.append("over T_th: the smallest useful step takes longer")
    if limit and memory and memory > limit:
        notes.append(f"does not fit its memory limit of {amount(limit)}")
    if client["num_rounds"] > 1:
        notes.append(f"its task takes {client['num_rounds']} rounds")
    if client["download_seconds"] is None:
        notes.append("link not measured yet")
    return notes
