"""``fedel.run``: a job on real servers and agents, on this machine or on a federation elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from fedel import config, plugins
from fedel.api import fetching, jobs
from fedel.api.code import packed, signed
from fedel.api.jobs import Job, JobTable, Overrides
from fedel.api.progress import Progress, Stopped, console_of, heard, say
from fedel.api.results import Result
from fedel.data.model_input import ModelInput
from fedel.desk import user_code
from fedel.desk.local import Federation, LocalFleet
from fedel.desk.screen import PHASES, Screen, more_than_there_are
from fedel.desk.submit import CodeToSend, control, create, follow, list_runs
from fedel.errors import ConfigError, DataError, ServiceError
from fedel.files import write_atomic
from fedel.job import RunConfig, Split
from fedel.job_code import JobCode
from fedel.records import Origin, RoundRecord, RunResult
from fedel.report import runs
from fedel.roles.run_state import TRIES_AGAIN
from fedel.security.tls import Tls
from fedel.serialisation import to_json
from fedel.simulation.job import SimulationConfig
from fedel.simulation.store import alone, check_same
from fedel.strategies import build
from fedel.tracking import OnRound, ignore, tracked
from fedel.types import Array, ModelSpec
from fedel.v1 import coordinator_pb2 as pb

T = TypeVar("T")


def run(
    job: Job,
    *,
    model: Any = None,
    data: Any = None,
    strategy: Any = None,
    overrides: Overrides = (),
    name: str = "",
    out: str | Path = "runs",
    coordinator: str = "",
    certs: str | Path = "",
    code: Sequence[str | Path] = (),
    resume: bool = False,
    mlflow: str = "",
    stop_on_exit: bool = False,
    progress: Progress = True,
) -> Result:
    """Run a job on real servers and agents: processes of this machine, or a federation that runs already.

    Models, data and methods reach those processes by name only. A function or class of a module is named by
    itself; one of a notebook, and arrays, are refused: put them into a module, or use ``fedel.simulate``.
    Ctrl-C ends the processes, and the same call with the run's ``name`` and ``resume=True`` continues it; at a
    federation elsewhere, the run goes on, and the same call with the same name takes it up again.

    Args:
        job: the path of a TOML file, a table with the same keys, or a ``RunConfig``.
        model: a function (or class) of a module that returns a ``torch.nn.Module``, or a name.
        data: a function of a module that returns the data, or a name.
        strategy: the name of a method, its table, or a method object.
        overrides: settings on top of the job: ``{"rounds.num_rounds": 5}``.
        name: of the run; by default job, method and time.
        out: the directory of runs.
        coordinator: ``HOST:PORT`` of a federation that runs already.
        certs: the folder of your certificate for it.
        code: files, folders or modules with your own model, data and method, which are sent along to it.
        resume: continue a run of this machine if it is there; returns at once if it is over.
        mlflow: address of an MLflow server that gets every round, ``http://HOST:PORT``.
        stop_on_exit: Ctrl-C stops the run at a federation elsewhere, after its open round.
        progress: ``True`` shows every round, ``False`` nothing, a function gets every ``RoundRecord``.
    """
    if isinstance(job, SimulationConfig):
        raise ConfigError(
            "job: a SimulationConfig has virtual devices; give its .run, a RunConfig, or simulate it"
        )
    made = jobs.read(job, model=model, data=data, strategy=strategy, overrides=overrides)
    _check_names(made)
    fleet = config.parse(LocalFleet, made.table.pop("fleet", {}), f"{made.where}: [fleet]")
    parsed = RunConfig.parse(made.table, made.where)
    if code and not coordinator:
        raise ConfigError("--code goes with --coordinator: on this machine, your own code is found without it")
    bundle = packed(made, code) if coordinator else None
    if coordinator and parsed.bundle and not bundle:
        raise ConfigError(
            f"{made.where}: this job came with code ({parsed.bundle[:12]}), which is not in the file: name it"
            " again with --code, or in [code] files"
        )
    parsed = replace(parsed, bundle=bundle.sha256 if bundle else "")
    sent_code = JobCode(bundle, "", "desk") if bundle else None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    with plugins.only(None, sent_code):
        name = name or f"{made.stem}-{build(parsed.strategy).name}-{stamp}"
    out = Path(out)
    directory, console = out / name, console_of(progress)
    if coordinator:
        _check_folder(directory, parsed)
    elif is_over(directory, parsed, resume):
        return Result(runs.load(directory), made.objects)
    if not coordinator:
        parsed = replace(parsed, split=Split())  # [fleet.data] says it
    fleet_size = 0 if coordinator else len(fleet.slowdowns)
    if fleet_size and (too_many := more_than_there_are(parsed.rounds.num_participants, fleet_size)):
        say(console, too_many, "yellow")
    if fleet_size and parsed.rounds.min_reports > fleet_size:
        raise ConfigError(
            f"{made.where}: rounds.min_reports = {parsed.rounds.min_reports}, but [fleet] has {fleet_size}"
            " agents: no round would ever close"
        )
    created = threading.Event()
    try:
        with (
            contextlib.nullcontext(True) if coordinator else alone(directory) as is_alone,
            tracked(mlflow, directory, parsed.table()) as track,
        ):
            if not is_alone:
                raise ConfigError(f"another process works on {directory}; wait for it, or choose another name")
            known = len(runs.load(directory).rounds) if (directory / "rounds.jsonl").exists() else 0

            def on_round(record: RoundRecord) -> None:
                if record.round >= known:  # a run that is followed again tells all its rounds
                    track(record)
                    heard(progress, record)

            if coordinator:
                tls, attended = Tls.of_user(str(certs)), console.is_terminal
                words = coordinator, name, parsed, directory, console, tls
                sent = signed(bundle, parsed, tls) if bundle else None
                following = one_run(
                    *words, attended=attended, on_round=on_round, on_created=created.set, code=sent
                )
                with plugins.only(None, sent_code):
                    status = finished(following)
            else:
                own, packages = _folders(made), user_code.packages(parsed)
                with Federation(directory / "federation", out, fleet, own, packages) as federation:
                    say(console, f"live page: {federation.page}")
                    status = finished(watched(federation, name, parsed, directory, console, on_round))
                federation.forget_state()
            if track is not ignore and status.phase == pb.RUN_PHASE_FINISHED:  # the server gets the report too
                with contextlib.suppress(ConfigError):
                    Result(runs.load(directory), made.objects).report()
    except KeyboardInterrupt:
        if not coordinator:
            raise Stopped(
                f"stopped; its rounds are in {directory}; continue it with the same job, --name {name} and"
                " --resume (Python: name=, resume=True)"
            ) from None
        tls = Tls.of_user(str(certs))
        raise Stopped(_left(coordinator, name, created.is_set(), stop_on_exit, tls)) from None
    if status.phase != pb.RUN_PHASE_FINISHED:
        raise ServiceError(_why_it_ended(status, directory))
    return Result(runs.load(directory), made.objects)


def is_over(directory: Path, job: RunConfig, resume: bool) -> bool:
    """Whether the run has finished before; raises ConfigError if it cannot begin or go on."""
    if not directory.exists() or not any(directory.iterdir()):
        return False
    if not resume:
        raise ConfigError(
            f"{directory} exists already: continue the run (--resume, in Python resume=True), choose another"
            " name (--name, name=), or delete it"
        )
    if (directory / "config.toml").exists():
        tables = (config.read(directory / "config.toml"), job.table(), RunConfig().table())
        before, now, at_default = map(fetching.sent, tables)
        check_same(before, now, directory, at_default)
    result = runs.load(directory).result if (directory / "result.json").exists() else None
    if result is not None and result.phase != PHASES[pb.RUN_PHASE_FINISHED]:
        raise ConfigError(
            f"{directory}: the run {result.phase} ({result.message or 'no reason given'}) and cannot go on;"
            " start another, from its best model if you like (--from)"
        )
    return result is not None


def _check_folder(directory: Path, job: RunConfig) -> None:
    """A run at a federation elsewhere is taken up again in its folder."""
    if (directory / "result.json").exists():
        raise ConfigError(f"{directory} exists already: choose another name (--name, name=), or delete it")
    fetching.check_folder(directory, job.table())


def _left(address: str, name: str, created: bool, stop: bool, tls: Tls) -> str:
    """What became of a run elsewhere when Ctrl-C ended the command here."""
    if not created:
        return (
            f"stopped before run '{name}' was created; `fedel runs --coordinator {address}` tells what is there"
        )
    if not stop:
        return f"stopped; {fetching.how_to_come_back(name, address, tls.dir)}"
    try:
        finished(control(address, name, pb.RUN_ACTION_STOP, tls, "its `fedel run --stop-on-exit` was left"))
    except ServiceError as error:
        return f"{error}\nstopped; {fetching.how_to_come_back(name, address, tls.dir)}"
    return (
        f"stopped; run '{name}' stops after its open round: `fedel runs fetch {name} --coordinator {address}`"
    )


def _why_it_ended(status: pb.RunStatus, directory: Path) -> str:
    phase = PHASES.get(status.phase, "?")
    said = (
        status.message
        if status.message.startswith(phase)
        else f"{phase}: {status.message or 'no reason given'}"
    )
    return f"run '{status.run}' {said}; model so far: {directory / 'model.safetensors'}"


def _check_names(made: JobTable) -> None:
    """An object of this process is of no use to others."""
    if not made.objects.by_name:
        return
    workload = made.table.get("workload", {})
    named = {key: workload.get(key) for key in ("model", "data")} | {"strategy": made.strategy.get("name")}
    what = next((key for key, name in named.items() if str(name).startswith(plugins.GIVEN)), "strategy")
    raise ConfigError(
        f"{what}: this object lies in no module, so the agents, which are other processes, cannot get it; put"
        " it into a file and name it as module:function, or simulate the job: fedel.simulate takes objects"
    )


def _folders(made: JobTable) -> list[str]:
    """Where the processes find the user's code: as the command has it, and where this process found it."""
    found = user_code.folders(made.file)
    workload = made.table.get("workload", {})
    for path in (workload.get("model", ""), workload.get("data", ""), *_methods(made.strategy)):
        module = sys.modules.get(str(path).partition(":")[0]) if ":" in str(path) else None
        file = getattr(module, "__file__", None)
        if module is not None and file:
            found.append(str(Path(file).absolute().parents[module.__name__.count(".")]))
    return list(dict.fromkeys(found))


def _methods(strategy: Mapping[str, Any]) -> list[str]:
    base = strategy.get("base")
    return [str(strategy.get("name", "")), *(_methods(base) if isinstance(base, Mapping) else ())]


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine, also in a notebook, whose thread has an event loop already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    answer: Future[T] = Future()
    loop = asyncio.new_event_loop()
    task = loop.create_task(coroutine)

    def wait() -> None:
        try:
            answer.set_result(loop.run_until_complete(task))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            loop.close()

    thread = threading.Thread(target=wait, name="fedel-run")
    try:
        thread.start()
        return answer.result()
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):  # the loop is closed: it was over just now
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()


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
    run = asyncio.create_task(one_run(*words, own=True, on_round=on_round))
    watch = asyncio.create_task(federation.watch())
    try:
        done, pending = await asyncio.wait({run, watch}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        run.cancel()
        watch.cancel()
        raise
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    if watch in done:
        watch.result()
    try:
        return run.result()
    except ServiceError as error:
        raise ServiceError(
            f"{error}\nThis command started the federation, which ends with it: mend the cause, then continue"
            f" with --name {name} --resume. The logs are in {federation.logs}."
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
    own: bool = False,
    on_round: OnRound = ignore,
    on_created: Callable[[], None] = lambda: None,
    code: CodeToSend | None = None,
) -> pb.RunStatus:
    """Create the run if it is not there, follow it to its end, and download its model.

    A run that paused by itself goes on when a person mends the cause: it is followed if one is ``attended``.
    In a federation of its ``own``, a person who continues it has mended the cause.
    """
    from fedel.training.initial import origin_of  # torch takes seconds to import

    taken, spec, tensors = await asyncio.to_thread(first_model, job)
    origin = await asyncio.to_thread(origin_of, job.workload)
    directory.mkdir(parents=True, exist_ok=True)
    taken.save(directory)
    known = {status.run: status.phase for status in await list_runs(address, tls)} if own else {}
    if name not in known:
        await create(address, name, job, spec, tensors, tls, code, to_json(taken))
    elif known[name] == pb.RUN_PHASE_PAUSED:
        await control(address, name, pb.RUN_ACTION_RESUME, tls)
    on_created()
    records: list[str] = []
    with Screen(console, spec.num_blocks) as screen:

        def show(status: pb.RunStatus) -> None:
            records.extend(status.rounds_json)
            screen.show(status)
            for line in status.rounds_json:
                on_round(RoundRecord.from_json(line))
            if not attended and has_paused_itself(status):
                raise ServiceError(f"run '{name}' paused: {status.message}")

        status = await follow(address, name, show, tls)
    await fetching.bring(address, status, records, directory, tls, job.table())
    if origin:
        _add_origin(directory / "result.json", origin)
    return status


def first_model(job: RunConfig) -> tuple[ModelInput, ModelSpec, dict[str, Array]]:
    """What the model takes, its tensors, and the values that they start from."""
    from fedel.training.factory import initial_model, make_data  # torch takes seconds to import

    if said := ModelInput.declared(job.workload):
        return said, *initial_model(job)
    try:
        data = make_data(job)
    except DataError as error:
        raise DataError(
            f"{error}. Is the data on the devices only? Then say in the job what a sample is like, such as"
            " [workload] input = [1, 28, 28] and classes = 4, and none is read here (docs/data.md)"
        ) from None
    return ModelInput.of(data), *initial_model(job, data=data)


def has_paused_itself(status: pb.RunStatus) -> bool:
    """Whether the run cannot go on before somebody mends something."""
    return status.phase == pb.RUN_PHASE_PAUSED and status.message.endswith(TRIES_AGAIN)


def _add_origin(file: Path, origin: Origin) -> None:
    """Servers do not know what the first model was made from."""
    result = RunResult.from_json(file.read_bytes(), str(file))
    write_atomic(file, replace(result, origin=origin).to_json())
