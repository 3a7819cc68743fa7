"""What a run left on disk, for Python: its rounds, its model, its report."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedel import config
from fedel.api.objects import Objects
from fedel.errors import ConfigError
from fedel.records import ExitTable, RoundRecord, RunResult
from fedel.report import runs, tables
from fedel.report.runs import StoredRun
from fedel.report.verdicts import verdicts
from fedel.report.words import percent, plural

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from fedel.report import plots
    from fedel.report.page import PagePicture


@dataclass(frozen=True, repr=False)
class Result:
    """A run on disk. It is read once: ``fedel.load(result.path)`` reads a run again that went on since."""

    stored: StoredRun
    """All of it, as the report reads it."""
    objects: Objects = field(default_factory=Objects, compare=False)
    """What the run was made from and no file holds."""

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.stored.path

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def rounds(self) -> list[RoundRecord]:
        """What is known about each closed round; ``record.round`` counts from 0."""
        return self.stored.rounds

    @property
    def accuracy(self) -> float | None:
        """Of the last test, as a share: 0.5 is 50 %. ``None`` if nothing was tested."""
        tests = self.stored.accuracies()
        return tests[-1][2] if tests else None

    @property
    def result(self) -> RunResult:
        """``result.json``: what the run came to."""
        if self.stored.result is None:
            raise ConfigError(
                f"{self.path}: the run is not over, {plural(len(self.rounds), 'round')} so far; continue it"
                " with resume=True"
            )
        return self.stored.result

    def frame(self) -> pd.DataFrame:
        """One row per round, with the columns of ``fedel report --csv``. Needs pandas."""
        return frame([self.stored])

    def model(self, exit: int | None = None, round: str = "last") -> nn.Module:
        """The trained network, ready to use: in eval mode, its weights frozen.

        With ``exit`` only the blocks up to that early exit: a smaller network (docs/use-the-model.md).
        ``round`` is ``last``, ``best``, or a number of rounds after which the model was kept.
        """
        from fedel.models.deploy import trained

        with self.objects.known():
            return trained(self.path, exit, round)

    def exits(self, round: str = "best", batch_size: int = 1) -> ExitTable:
        """Measure what each early exit of the model is worth here; reports that are written later show it."""
        from fedel.training.exit_table import measured

        with self.objects.known():
            return measured(self.path, round, batch_size)

    def figure(self, name: str = "accuracy-by-time") -> Drawing:
        """A picture of the report, to show in a notebook or to ``save``."""
        from fedel.report.page import pictures_of

        return Drawing.named(name, pictures_of([self.stored]), [self.stored])

    def report(self, path: str | Path | None = None) -> Path:
        """Write ``report.html`` and ``report.md``, into the run's own directory or another one."""
        try:
            from fedel.report import page
        except ImportError:
            raise ConfigError("a report needs matplotlib: pip install 'fedel[plots]'") from None
        place = Path(path) if path is not None else self.path
        place.mkdir(parents=True, exist_ok=True)
        return page.write([self.stored], place)

    def __repr__(self) -> str:
        tested = "not tested" if self.accuracy is None else f"accuracy {percent(self.accuracy)}"
        said = f"{self.stored.method}, {plural(len(self.rounds), 'round')}, {tested}, {self.stored.phase}"
        return f"Result({str(self.path)!r}: {said})"

    def _repr_html_(self) -> str:
        lines = "<br>".join(map(html.escape, verdicts([self.stored])))
        return (
            f"<p><b>{html.escape(self.name)}</b><br>{lines}<br><code>{html.escape(str(self.path))}</code></p>"
        )


@dataclass(frozen=True, repr=False)
class Drawing:
    """A picture: a notebook shows it, ``save`` writes it to a file."""

    name: str
    picture: plots.Picture
    runs: Sequence[StoredRun]

    @staticmethod
    def named(name: str, pictures: Sequence[PagePicture], found: Sequence[StoredRun]) -> Drawing:
        known = {each: picture for each, _, picture, _ in pictures}
        if name not in known:
            raise ConfigError(f"there is no figure '{name}'; {config.nearest(name, known)}")
        return Drawing(name, known[name], found)

    def save(self, file: str | Path) -> Path:
        """As ``pdf``, ``png`` or ``svg``: the name of the file says it."""
        from fedel.report import plots

        kind = Path(file).suffix.removeprefix(".")
        if kind not in plots.FORMATS:
            raise ConfigError(f"{file}: a figure is saved as {', '.join(plots.FORMATS)}; end the name with one")
        plots.save(self.picture, self.runs, Path(file))
        return Path(file)

    def __repr__(self) -> str:
        return f"Drawing({self.name!r})"

    def _repr_svg_(self) -> str:
        from fedel.report import plots

        return plots.draw(self.picture, self.runs)


def load(path: str | Path, *, model: Any = None, data: Any = None) -> Result:
    """Read the run in a directory, finished or not.

    A run that was made from Python objects needs the same objects for ``model()``: give ``model`` and ``data``
    again. Rounds, frames and reports need nothing.
    """
    stored, objects = runs.load(path), Objects()
    workload = stored.settings.get("workload", {})
    given = {
        "model": objects.model(model) if model is not None else None,
        "data": objects.data(data) if data is not None else None,
    }
    for what, name in given.items():
        if name is not None and name != workload.get(what):
            raise ConfigError(
                f"{path}: {what} is '{name}', but the run was made with '{workload.get(what)}'; give the same"
                " object"
            )
    return Result(stored, objects)


def frame(found: Sequence[StoredRun]) -> pd.DataFrame:
    """The rounds of runs, one below the other."""
    try:
        import pandas as pd
    except ImportError:
        raise ConfigError("frame() needs pandas: pip install pandas; .rounds needs nothing") from None
    return pd.DataFrame([row for run in found for row in tables.rows(run)], columns=list(tables.COLUMNS))
