"""``fedel.simulate``: a fleet of unequal devices on a virtual clock, in processes of this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from fedel.api import jobs
from fedel.api.jobs import Job, Overrides
from fedel.api.progress import Progress, Stopped, console_of, heard, say, screen
from fedel.api.results import Result
from fedel.desk.screen import more_than_there_are
from fedel.errors import ConfigError
from fedel.records import RoundRecord
from fedel.report import runs
from fedel.report.words import plural
from fedel.simulation import start
from fedel.simulation.store import RunFolder, alone
from fedel.tracking import ignore, tracked


def simulate(
    job: Job,
    *,
    model: Any = None,
    data: Any = None,
    strategy: Any = None,
    overrides: Overrides = (),
    name: str = "",
    out: str | Path = "runs",
    workers: int = 0,
    executor: str = "processes",
    resume: bool = False,
    mlflow: str = "",
    progress: Progress = True,
) -> Result:
    """Train for real, and count the time that a fleet of unequal devices would take.

    Every round is on disk in ``out/name`` before the next one begins. Ctrl-C stops the run; the same call with
    ``resume=True`` continues it, to the same bits, and returns at once if it is over.

    Args:
        job: the path of a TOML file, a table with the same keys, or a ``SimulationConfig``.
        model: a function (or class) that returns a ``torch.nn.Module``, or the name of a model.
        data: ``(x_train, y_train, x_test, y_test)``, a ``fedel.data.Dataset``, a function that returns one of
            these, or the name of a data set.
        strategy: the name of a method, its table, or a method object such as ``FedEL(beta=0.4)``.
        overrides: settings on top of the job: ``{"work.lr": 0.1}``.
        name: of the run; by default job, method and seed.
        out: the directory of runs.
        workers: processes that train; 0 takes one per core. Objects reach them, because they are forked.
        executor: ``processes``, ``serial`` (this process alone) or ``ray``.
        resume: continue the run if it is there.
        mlflow: address of an MLflow server that gets every round, ``http://HOST:PORT``.
        progress: ``True`` shows every round, ``False`` nothing, a function gets every ``RoundRecord``.
    """
    made = jobs.read(job, model=model, data=data, strategy=strategy, overrides=overrides)
    config, console = made.simulation(), console_of(progress)
    path = Path(out) / (name or f"{made.stem}-{made.label(config.run.strategy)}-{config.run.seed}")
    num_rounds = config.run.rounds.num_rounds
    if too_many := more_than_there_are(config.run.rounds.num_participants, config.partition.num_clients):
        say(console, too_many, "yellow")
    RunFolder(path).check(config.table(), resume)
    try:
        with made.objects.known(), alone(path) as is_alone:
            if not is_alone:
                raise ConfigError(f"another process works on {path}; wait for it, or choose another name")
            with (
                tracked(mlflow, path, config.table()) as track,
                start.session(config, path, resume=resume, executor=executor, num_workers=workers) as session,
                screen(console, session.num_played, num_rounds) as shown,
            ):

                def round_done(record: RoundRecord) -> None:
                    shown.round_done(record)
                    track(record)
                    heard(progress, record)

                start.play_all(session, round_done, shown.client_done)
                if track is not ignore:  # the server gets the report too
                    with suppress(ConfigError):
                        Result(runs.load(path), made.objects).report()
    except KeyboardInterrupt:
        done = plural(len(RunFolder(path).records()), "round")
        raise Stopped(
            f"stopped; {done} of {num_rounds} are in {path}: continue with the same call and resume=True"
        ) from None
    return Result(runs.load(path), made.objects)
