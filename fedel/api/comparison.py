"""``fedel.compare``: one job, several methods, the same seeds for each of them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedel.api import side_by_side
from fedel.api.jobs import Job, JobTable, Overrides, read
from fedel.api.progress import Progress, RunLines, Stopped
from fedel.api.results import Drawing, Result, frame
from fedel.errors import ConfigError, ServiceError
from fedel.experiments import compare as over_seeds
from fedel.experiments import runner
from fedel.experiments.compare import MethodFigures
from fedel.experiments.plans import PlannedRun, distinct
from fedel.report import runs, tables
from fedel.report.figures import labels
from fedel.report.runs import StoredRun

if TYPE_CHECKING:
    import pandas as pd

SEEDS = 3


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods on one job, with the same seeds for each of them."""

    path: Path
    """Its directory; the runs are in ``runs`` below it."""
    title: str
    results: Mapping[str, Sequence[Result]]
    """The runs of each method, one per seed."""
    failed: Mapping[str, str]
    """Runs that failed, with the reason."""

    @cached_property
    def methods(self) -> list[MethodFigures]:
        """The figures of each method: means with intervals, and leads over the first method."""
        return over_seeds.figures(self._stored)

    @property
    def sentences(self) -> list[str]:
        """What comes of it, in words."""
        return over_seeds.sentences(self._stored)

    def frame(self) -> pd.DataFrame:
        """One row per round of every run, with a first column ``method``. Needs pandas."""
        found = frame([run for each in self._stored.values() for run in each])
        named = [label for label, each in self._stored.items() for run in each for _ in run.rounds]
        found.insert(0, "method", named)
        return found

    def figure(self, name: str = "accuracy-by-time") -> Drawing:
        """A picture of the report, to show in a notebook or to ``save``."""
        from fedel.experiments import compare_page

        return Drawing.named(name, compare_page.pictures(self._stored), compare_page.first_seed(self._stored))

    def report(self, path: str | Path | None = None) -> Path:
        """Write ``report.html`` and ``report.md``, into the comparison's own directory or another one."""
        from fedel.experiments import compare_page

        failed = [f"{name}: {why}" for name, why in self.failed.items()]
        return compare_page.write(
            self._stored, Path(path) if path is not None else self.path, self.title, failed
        )

    def save_csv(self, directory: str | Path) -> list[Path]:
        """One CSV file per run, one row per round."""
        return tables.write_csv([run for each in self._stored.values() for run in each], Path(directory))

    def save_figures(self, directory: str | Path, *formats: str) -> list[Path]:
        """Every picture of the report as a file: ``pdf``, ``png`` or ``svg``."""
        from fedel.experiments import compare_page
        from fedel.report import page

        pictures, drawn = compare_page.pictures(self._stored), compare_page.first_seed(self._stored)
        return [file for kind in formats for file in page.save_pictures(drawn, Path(directory), kind, pictures)]

    @cached_property
    def _stored(self) -> dict[str, list[StoredRun]]:
        return {label: [each.stored for each in found] for label, found in self.results.items()}

    def table(self) -> str:
        """The figures as text."""
        from fedel.experiments import compare_page

        made = compare_page.table(self.methods)
        rows = [made.heads, *made.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def __repr__(self) -> str:
        found = ", ".join(f"{each.method} {over_seeds.accuracy(each.same_time)}" for each in self.methods)
        return f"Comparison({str(self.path)!r}: after the same time {found})"

    def _repr_html_(self) -> str:
        from fedel.experiments import compare_page

        made = compare_page.table(self.methods)
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in made.heads)
        rows = "".join(
            f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in made.rows
        )
        said = "<br>".join(map(html.escape, self.sentences))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{said}</p>"


def compare(
    job: Job,
    methods: Sequence[Any] | Mapping[str, Any],
    seeds: int = SEEDS,
    *,
    model: Any = None,
    data: Any = None,
    overrides: Overrides = (),
    out: str | Path = "",
    jobs: int = 0,
    workers: int = 0,
    executor: str = "processes",
    progress: Progress = True,
) -> Comparison:
    """Simulate a job with several methods, each with the same seeds, and compare them over the seeds.

    Runs that are there already are used again, and those that were stopped go on: call it again after Ctrl-C,
    with more seeds or with another method. A job that differs in any setting has runs of its own.

    Args:
        job, model, data, overrides, executor, progress: as for ``fedel.simulate``.
        methods: names, tables or method objects; as a mapping, with the labels that the report shows. The
            options in the job's ``[strategy]`` are for the method that it names; others have their defaults.
        seeds: how many: the job's own seed, and those after it.
        out: directory of the runs and the report; by default ``runs/compare-`` and the name of the job.
        jobs: runs at the same time, each in its own process; 0 takes one per core. The figures are the same.
        workers: processes that train in each run; 0 shares the cores among the runs.
    """
    made = read(job, model=model, data=data, overrides=overrides)
    planned = _planned(made, methods, seeds)
    place, screen = Path(out) if str(out) else Path("runs") / f"compare-{made.stem}", RunLines(progress)
    wanted = distinct(planned)
    try:
        with made.objects.known():
            failed = side_by_side.do_missing(
                wanted, place / "runs", screen, num_jobs=jobs, executor=executor, num_workers=workers
            )
    except KeyboardInterrupt:
        states = [runner.state(run, place / "runs") for run in wanted]
        raise Stopped(
            f"stopped; {states.count(runner.DONE)} of {len(wanted)} runs in {place} are done: continue with"
            " the same call"
        ) from None
    found = over_seeds.with_equal_seeds(_stored(planned, place / "runs"))
    if not any(found.values()):
        why = "; ".join(dict.fromkeys(failed.values())) or "another process works on its runs"
        raise ServiceError(f"{place}: no seed is done with every method: {why}")
    names = list(found) if isinstance(methods, Mapping) else labels([each[0] for each in found.values()])
    results = {
        name: [Result(run, made.objects) for run in each]
        for name, each in zip(names, found.values(), strict=True)
    }
    return Comparison(place, f"{' and '.join(results)}: {made.stem}", results, failed)


def _planned(made: JobTable, methods: Sequence[Any] | Mapping[str, Any], seeds: int) -> list[PlannedRun]:
    if isinstance(methods, str) or not methods:
        raise ConfigError("methods: name at least one, as a list: ['fedel', 'fedavg']")
    if seeds < 1:
        raise ConfigError(f"seeds = {seeds}: at least one run of every method is needed")
    asked = methods.items() if isinstance(methods, Mapping) else ((None, each) for each in methods)
    own_jobs: dict[str, dict[str, Any]] = {}
    for label, wanted in asked:
        strategy = made.method(wanted)
        name = label or made.label(strategy)
        if name in own_jobs:
            raise ConfigError(
                f"methods: two are called '{name}'; give each a label: {{'{name} a': ..., '{name} b': ...}}"
            )
        own_jobs[name] = {**made.table, "strategy": strategy}
    with made.objects.known():
        first = made.simulation().run.seed
        return over_seeds.plan(own_jobs, made.stem, range(first, first + seeds))


def _stored(planned: Sequence[PlannedRun], place: Path) -> dict[str, list[StoredRun]]:
    found: dict[str, list[StoredRun]] = {}
    for run in planned:
        done = runner.state(run, place) == runner.DONE
        found.setdefault(run.label, []).extend([runs.load(place / run.name)] if done else [])
    return found
