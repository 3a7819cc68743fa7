"""``fedel run``: a job, on processes of this machine or on a federation that is there already."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from fedel_coordinator.records import run_result
from fedel_coordinator.rundir import RunDirectory
from fedel_coordinator.store import RunRow
from rich.console import Console

from fedel import config
from fedel.cli.certs import add_certs
from fedel.cli.local import Federation, Fleet
from fedel.cli.screen import PHASES, Screen
from fedel.cli.submit import create, follow, save_model
from fedel.errors import ConfigError, ServiceError
from fedel.job import RunConfig
from fedel.roles.coordinator import Director
from fedel.security.tls import Tls
from fedel.strategies import build
from fedel.v1 import coordinator_pb2 as pb

EXAMPLE = """example:
  fedel run configs/digits.toml
  fedel run job.toml --set strategy.name=fedavg --set rounds.num_rounds=5
  fedel run job.toml --coordinator server:7070     # on a federation that is there already
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "run",
        help="run a job: all of it on this machine, or on a federation",
        description="Run a job. Without --coordinator, servers and agents are started on this machine.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("job", type=Path, help="TOML file: strategy, model, data, rounds, work, budget, fleet")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )
    parser.add_argument("--name", default="", help="name of the run (default: job, strategy and time)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where the run's directory goes")
    parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="use this federation")
    add_certs(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=main)


def read_job(path: Path, overrides: list[str]) -> tuple[RunConfig, Fleet]:
    """A job file's two halves: the run, and the fleet for a run on this machine."""
    table = config.read(path, overrides)
    fleet = config.parse(Fleet, table.pop("fleet", {}), f"{path}: [fleet]")
    return RunConfig.parse(table, str(path)), fleet


def main(arguments: argparse.Namespace) -> int:
    job, fleet = read_job(arguments.job, arguments.set)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = arguments.name or f"{arguments.job.stem}-{build(job.strategy).name}-{stamp}"
    directory = arguments.out / name
    if directory.exists():
        raise ConfigError(f"{directory} is there already: choose another --name, or delete it")
    console = Console(stderr=True) if arguments.json else Console()
    if arguments.coordinator:
        status = asyncio.run(
            one_run(arguments.coordinator, name, job, directory, console, Tls.of_user(arguments.certs))
        )
    else:
        with Federation(directory / "federation", arguments.out, fleet) as federation:
            console.print(f"live page: {federation.page}", highlight=False, soft_wrap=True)
            status = asyncio.run(watched(federation, name, job, directory, console))
        federation.forget_state()
    return finish(status, directory, console, arguments.json)


async def watched(
    federation: Federation, name: str, job: RunConfig, directory: Path, console: Console
) -> pb.RunStatus:
    """The run, until it is over or a process of the federation ends by itself."""
    run = asyncio.create_task(one_run(federation.coordinator, name, job, directory, console))
    watch = asyncio.create_task(federation.watch())
    done, pending = await asyncio.wait({run, watch}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if watch in done:
        watch.result()
    return run.result()


async def one_run(
    address: str, name: str, job: RunConfig, directory: Path, console: Console, tls: Tls | None = None
) -> pb.RunStatus:
    """Create the run, follow it to its end, and bring its model home."""
    from fedel.training.factory import initial_model  # torch takes seconds to import

    spec, tensors = await asyncio.to_thread(initial_model, job)
    directory.mkdir(parents=True, exist_ok=True)
    await create(address, name, job, spec, tensors, tls)
    records: list[str] = []
    with Screen(console, spec.num_blocks) as screen:

        def show(status: pb.RunStatus) -> None:
            records.extend(status.rounds_json)
            screen.show(status)

        status = await follow(address, name, show, tls)
    await save_model(address, name, directory / "model.safetensors", tls)
    if not (directory / "rounds.jsonl").exists():
        _write_directory(directory, Director(job, spec), status, records)
    return status


def _write_directory(directory: Path, director: Director, status: pb.RunStatus, records: list[str]) -> None:
    """The run's files, where the coordinator keeps its own copy on another machine."""
    row = RunRow(
        name=status.run,
        config_json=status.config_json,
        spec_json="",
        num_shards=0,
        phase=PHASES[status.phase],
        message=status.message,
        created_at=status.created_at,
        ended_at=time.time(),
        model_version=status.model_version,
    )
    files = RunDirectory(directory)
    files.start(director.run.table(), records)
    files.finish(run_result(row, director, [json.loads(text) for text in records]))


def finish(status: pb.RunStatus, directory: Path, console: Console, as_json: bool) -> int:
    """Say what came of it and where it lies."""
    from fedel.report import page, runs

    if status.phase != pb.RUN_PHASE_FINISHED:
        raise ServiceError(
            f"run '{status.run}' {PHASES.get(status.phase, '?')}: {status.message or 'no reason given'}"
        )
    report = page.write([runs.load(directory)], directory)
    result = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    if as_json:
        print(json.dumps(result))
    else:
        accuracy = result.get("accuracy")
        said = f"accuracy {100 * accuracy:.1f} %" if accuracy is not None else "no test data, so no accuracy"
        console.print(f"{said}; report: {report}", soft_wrap=True)
    return 0
