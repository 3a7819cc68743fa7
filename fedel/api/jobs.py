"""A job in any of its forms, with objects and overrides, as one table."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedel import config
from fedel.api.objects import Objects
from fedel.desk import user_code
from fedel.errors import ConfigError
from fedel.job import CodeFiles, RunConfig
from fedel.simulation.job import SimulationConfig
from fedel.strategies import find

Job = str | Path | Mapping[str, Any] | RunConfig | SimulationConfig
Overrides = Mapping[str, Any] | Iterable[str]
"""``{"work.lr": 0.1}``, or texts as the command takes them, ``["work.lr=0.1"]``."""


@dataclass(frozen=True)
class JobTable:
    """What a job says, and the objects that it names."""

    table: dict[str, Any]
    where: str
    """For messages: its file, or ``job``."""
    stem: str
    """Begins the names of its runs."""
    objects: Objects
    file: Path | None = None
    code: CodeFiles = field(default_factory=CodeFiles)
    """What is sent along to a federation elsewhere."""

    @property
    def strategy(self) -> Mapping[str, Any]:
        found = self.table.get("strategy", {"name": "fedel"})
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"{self.where}: strategy = {found!r}: expected a table of keys, [strategy] in a file"
            )
        return found

    def simulation(self) -> SimulationConfig:
        with self.objects.known():
            return SimulationConfig.parse(self.table, self.where)

    def method(self, wanted: Any) -> dict[str, Any]:
        """The table of a method; if it is named as the job's own, with the options that the job has for it."""
        table = self.objects.strategy(wanted)
        return {**self.strategy, **table} if table.get("name") == self.strategy.get("name") else table

    def label(self, strategy: Mapping[str, Any]) -> str:
        """The name of a method for the name of a run: ``fedprox-fedel``."""
        with self.objects.known():
            name = str(find(str(strategy.get("name", ""))).name)
        base = strategy.get("base")
        return f"{name}-{self.label(base)}" if isinstance(base, Mapping) else name


def read(
    job: Job, *, model: Any = None, data: Any = None, strategy: Any = None, overrides: Overrides = ()
) -> JobTable:
    """The job with what was given in addition; nothing is checked yet but its form."""
    file: Path | None = None
    if isinstance(job, str | Path):
        file = Path(job)
        user_code.search(file)
        table = config.read(file)
    elif isinstance(job, RunConfig | SimulationConfig):
        table = job.table()
    elif isinstance(job, Mapping):
        table = _copied(job)
    else:
        raise ConfigError(
            f"job: a {type(job).__name__}; give the path of a TOML file, a table with its keys, or a"
            " SimulationConfig or RunConfig"
        )
    _override(table, overrides if isinstance(overrides, Mapping) else list(overrides))
    where, stem = (str(file), file.stem) if file else ("job", "job")
    code = config.parse(CodeFiles, table.pop("code", {}), f"{where}: [code]")
    made = JobTable(table, where, stem, Objects(), file, code)
    if model is not None:
        config.put(table, "workload.model", made.objects.model(model), where)
    if data is not None:
        config.put(table, "workload.data", made.objects.data(data), where)
    if strategy is not None:
        table["strategy"] = made.method(strategy)
    return made


def _override(table: dict[str, Any], overrides: Overrides) -> None:
    """In place. Another method starts from its own defaults: the job's options are for the method it names.

    >>> table = {"strategy": {"name": "fedel", "beta": 0.4}}
    >>> _override(table, ["strategy.name=fedavg", "strategy.weighting=samples"]); table
    {'strategy': {'name': 'fedavg', 'weighting': 'samples'}}
    """
    asked: dict[str, Any] = {}
    _apply(asked, overrides)
    strategy, wanted = table.get("strategy"), asked.get("strategy")
    if isinstance(strategy, Mapping) and isinstance(wanted, Mapping):
        name = strategy.get("name")
        if wanted.get("name", name) != name:
            table["strategy"] = {}
    _apply(table, overrides)


def _apply(table: dict[str, Any], overrides: Overrides) -> None:
    for each in overrides.items() if isinstance(overrides, Mapping) else overrides:
        if isinstance(each, str):
            config.override_key(table, each)
        else:
            config.put(table, each[0], each[1], f"overrides: {each[0]}")


def _copied(table: Mapping[str, Any]) -> dict[str, Any]:
    """Its sections, too: an override must not change the caller's."""
    return {
        key: _copied(value) if isinstance(value, Mapping) else copy.copy(value) for key, value in table.items()
    }
