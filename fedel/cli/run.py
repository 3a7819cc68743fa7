"""``fedel run``: a job, on processes of this machine or on a federation that runs already."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import replace
from pathlib import Path

from fedel_coordinator.run_directory import RunDirectory
from rich.console import Console

from fedel.cli import job_options, user_code
from fedel.cli.certs import add_certs
from fedel.cli.local import Federation, read_job
from fedel.cli.screen import PHASES, Screen, more_than_there_are
from fedel.cli.submit import create, follow, save_model
from fedel.data.model_input import ModelInput
from fedel.errors import ConfigError, ServiceError
from fedel.files import write_atomic
from fedel.job import RunConfig
from fedel.records import Origin, RoundRecord, RunResult, best_of, run_result
from fedel.roles.run_state import TRIES_AGAIN
from fedel.security.tls import Tls
from fedel.serialisation import to_json
from fedel.strategies import build
from fedel.strategies.base import clock_of
from fedel.tracking import OnRound, ignore, tracked
from fedel.types import Array, ModelSpec
from fedel.v1 import coordinator_pb2 as pb

EXAMPLE = """example:
  fedel run examples/own.toml
  fedel run examples/own.toml --set strategy.name=fedavg --set rounds.num_rounds=5
  fedel run examples/own.toml --coordinator server:7070     # on a federation that runs already
"""


def add_parser(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser(
        "run",
        description="Run a job. Without --coordinator, servers and agents are started on this machine. "
        "Your own models and data are searched in the working directory, then in the folder of the job file.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "job", type=Path, help="TOML file with [strategy], [workload], [rounds], ...: docs/job.md"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting"
    )
    job_options.add(parser)
    parser.add_argument("--name", default="", help="name of the run (default: job, strategy and time)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="directory of runs (default: runs)")
    parser.add_argument("--coordinator", default="", metavar="HOST:PORT", help="use this federation")
    add_certs(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=main)


def main(arguments: argparse.Namespace) -> int:
    user_code.search(arguments.job)
    job, fleet = read_job(arguments.job, job_options.settings(arguments))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = arguments.name or f"{arguments.job.stem}-{build(job.strategy).name}-{stamp}"
    directory = arguments.out / name
    if directory.exists():
        raise ConfigError(f"{directory} exists already: choose another --name, or delete it")
    console = Console(stderr=True) if arguments.json else Console()
    fleet_size = 0 if arguments.coordinator else len(fleet.slowdowns)
    if fleet_size and (too_many := more_than_there_are(job.rounds.num_participants, fleet_size)):
        console.print(too_many, style="yellow", highlight=False, soft_wrap=True)
    with tracked(arguments.mlflow, directory, job.table()) as track:
        if arguments.coordinator:
            tls, attended = Tls.of_user(arguments.certs), console.is_terminal
            words = arguments.coordinator, name, job, directory, console, tls
            status = asyncio.run(one_run(*words, attended=attended, on_round=track))
        else:
            own = user_code.folders(arguments.job)
            code = user_code.packages(job)
            with Federation(directory / "federation", arguments.out, fleet, own, code) as federation:
                console.print(f"live page: {federation.page}", highlight=False, soft_wrap=True)
                status = asyncio.run(watched(federation, name, job, directory, console, track))
            federation.forget_state()
        return finish(status, directory, console, arguments.json)


async def watched(
    federation: Federation,
    name: str,
    job: RunConfig,
    directory: Path,
    console: Console,
    on_round: OnRound = ignore,
) -> pb.RunStatus:
    """Follow the run until it is over. Raises if a process of the federation ends by itself."""
    words = federation.coordinator, name, job, directory, console, federation.tls
    run = asyncio.create_task(one_run(*words, on_round=on_round))
    watch = asyncio.create_task(federation.watch())
    done, pending = await asyncio.wait({run, watch}, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if watch in done:
        watch.result()
    try:
        return run.result()
    except ServiceError as error:
        raise ServiceError(
            f"{error}\nThis command started the federation, which ends with it: mend the cause, then start the"
            f" job again. The logs are in {federation.logs}."
        ) from None


async def one_run(
    address: str,
    name: str,
    job: RunConfig,
    directory: Path,
    console: Console,
    tls: Tls | None = None,
    *,
    attended: bool = False,
    on_round: OnRound = ignore,
) -> pb.RunStatus:
    """Create the run, follow it to its end, and download its model.

    A run that paused by itself goes on when a person mends the cause: it is followed if one is ``attended``.
    """
    from fedel.training.initial import origin_of

    taken, spec, tensors = await asyncio.to_thread(first_model, job)
    origin = await asyncio.to_thread(origin_of, job.workload)
    directory.mkdir(parents=True, exist_ok=True)
    taken.save(directory)
    await create(address, name, job, spec, tensors, tls)
    records: list[str] = []
    with Screen(console, spec.num_blocks) as screen:

        def show(status: pb.RunStatus) -> None:
            records.extend(status.rounds_json)
            for text in status.rounds_json:
                on_round(RoundRecord.from_json(text))
            screen.show(status)
            if not attended and has_paused_itself(status):
                raise ServiceError(f"run '{name}' paused: {status.message}")

        status = await follow(address, name, show, tls)
    await save_model(address, name, directory / "model.safetensors", tls)
    if best := best_of([RoundRecord.from_json(text) for text in records]):
        await save_model(address, name, directory / "best.safetensors", tls, best.version)
    if not (directory / "rounds.jsonl").exists():
        _write_directory(directory, job, spec, status, records)
    if origin:
        _add_origin(directory / "result.json", origin)
    return status


def first_model(job: RunConfig) -> tuple[ModelInput, ModelSpec, dict[str, Array]]:
    """What the model takes, its tensors, and the values that they start from."""
    from fedel.training.factory import initial_model, make_data  # torch takes seconds to import

    data = make_data(job)
    return ModelInput.of(data), *initial_model(job, data=data)


def has_paused_itself(status: pb.RunStatus) -> bool:
    """Whether the run cannot go on before somebody mends something."""
    return status.phase == pb.RUN_PHASE_PAUSED and status.message.endswith(TRIES_AGAIN)


def _write_directory(
    directory: Path, job: RunConfig, spec: ModelSpec, status: pb.RunStatus, records: list[str]
) -> None:
    """The files of the run, if the coordinator is on another machine and keeps its own copy there."""
    strategy = build(job.strategy)
    result = run_result(
        name=status.run,
        phase=PHASES[status.phase],
        message=status.message,
        strategy=strategy.name,
        seed=job.seed,
        scope=clock_of(strategy),
        weights=[tensor.name for tensor in spec.weights],
        records=[RoundRecord.from_json(text) for text in records],
        wall_seconds=time.time() - status.created_at,
        model_version=status.model_version,
    )
    files = RunDirectory(directory)
    files.start(job.table(), records)
    files.finish(result)


def _add_origin(file: Path, origin: Origin) -> None:
    """Servers do not know what the first model was made from."""
    result = RunResult.from_json(file.read_bytes(), str(file))
    write_atomic(file, replace(result, origin=origin).to_json())


def finish(status: pb.RunStatus, directory: Path, console: Console, as_json: bool) -> int:
    """Print the result and where the report is."""
    from fedel.report import page, runs
    from fedel.report.verdicts import verdicts

    if status.phase != pb.RUN_PHASE_FINISHED:
        raise ServiceError(
            f"run '{status.run}' {PHASES.get(status.phase, '?')}: {status.message or 'no reason given'}"
        )
    found = runs.load(directory)
    report = page.write([found], directory)
    file = directory / "result.json"
    result = RunResult.from_json(file.read_text(encoding="utf-8"), str(file))
    if as_json:
        print(to_json(result))
    else:
        for line in (*verdicts([found]), f"report: {report}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0
