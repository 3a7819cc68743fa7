"""Lists the runs that an experiment needs. Equal runs are one run, even if several experiments need them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from fedel import config
from fedel.config import nearest
from fedel.errors import ConfigError
from fedel.experiments.scale import Scale, Setting, Task, overlaid
from fedel.simulation.job import SimulationConfig
from fedel.strategies import METHODS, complete

BASELINES = ("fedavg", "elastictrainer", "heterofl", "depthfl", "pyramidfl", "timelyfl", "fiarse")
CONTROLS = ("fedavg-cut", "fedavg-fast")
"""Simple ways to keep T_th; not methods of the paper."""
BEST = "fedel-best"
"""FedEL with the scale's preset."""
CUT_BEST = "fedavg-cut-best"
"""The plain rival with those parts of the preset that it can have."""
WHOLE_STEP = ", whole step"
"""Marks a variant whose T_th counts the whole step."""
BETAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
BUDGETS = (0.5, 0.75, 1.0)
"""T_th as a share of the fastest device's time for the whole model."""


@dataclass(frozen=True)
class Variant:
    """A method with its options, and other changes to the job."""

    label: str
    strategy: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    preset: bool = False
    """With all parts of the scale's preset that the method can have."""
    without: str = ""
    """But this one."""

    @property
    def has_short_rounds(self) -> bool:
        """Whether its rounds take about T_th, however slow the devices."""
        return self.strategy["name"] not in ("fedavg", "pyramidfl")


def _plain(*names: str) -> tuple[Variant, ...]:
    return tuple(Variant(name, {"name": name}) for name in names)


def _beta(value: float) -> Variant:
    return Variant(f"beta {value:g}", {"name": "fedel", "beta": value})


def _budget(share: float) -> Variant:
    job = {} if share == 1 else {"budget": {"policy": "share", "value": share}}
    return Variant(f"T_th x {share:g}", {"name": "fedel"}, job)


def _around(wrapper: str, base: str) -> Variant:
    label = wrapper if base == "fedavg" else f"{wrapper}-{base}"
    return Variant(label, {"name": wrapper, "base": {"name": base}})


_EVERY = _plain(*BASELINES, "fedel", *CONTROLS)
_BEST = Variant(BEST, {"name": "fedel"}, preset=True)
_DISJOINT = Variant("fedel-c", {"name": "fedel", "variant": "disjoint"})


@dataclass(frozen=True)
class Experiment:
    title: str
    variants: tuple[Variant, ...]
    tasks: tuple[str, ...] = ()
    """Used if the scale does not name any; empty means all."""
    leaves_out: bool = False
    """Also the preset without each of its parts and with what was tried besides, and other methods with those
    parts that they can have."""


EXPERIMENTS: Mapping[str, Experiment] = {
    "headline": Experiment(
        "FedEL, FedAvg and simple controls over time",
        (
            *_plain("fedavg", *CONTROLS, "fedel"),
            _BEST,
            Variant(CUT_BEST, {"name": "fedavg-cut"}, preset=True),
            Variant("fedel" + WHOLE_STEP, {"name": "fedel"}, {"scope": "train"}),
            Variant(BEST + WHOLE_STEP, {"name": "fedel"}, {"scope": "train"}, preset=True),
        ),
    ),
    "ablation": Experiment(
        "What each part of the preset brings", (*_plain("fedavg", "fedel"), _BEST), leaves_out=True
    ),
    "table1": Experiment("Accuracy and time of FedEL and its baselines (table 1)", _EVERY),
    "deviation": Experiment(
        "Training time of a round compared with T_th (appendix C)",
        (
            *_plain("fedavg", "fedel"),
            Variant("fedel, probe in T_th", {"name": "fedel", "probe_in_budget": True}),
            Variant("fedel" + WHOLE_STEP, {"name": "fedel"}, {"scope": "train"}),
        ),
    ),
    "composition": Experiment(
        "FedProx and FedNova with and without FedEL (appendix C)",
        tuple(_around(w, b) for w in ("fedprox", "fednova") for b in ("fedavg", "fedel")),
        ("cifar10",),
    ),
    "rollback": Experiment(
        "The bias term O1 with and without rollback (appendix C)",
        (
            Variant("rollback", {"name": "fedel"}),
            Variant("no-rollback", {"name": "fedel", "variant": "no-rollback"}),
        ),
        ("cifar10",),
    ),
    "beta": Experiment("Local against global importance", (*_plain("fedavg"), *map(_beta, BETAS))),
    "budget": Experiment("Smaller budgets T_th", (*_plain("fedavg"), *map(_budget, BUDGETS))),
    "window": Experiment("FedEL compared with FedEL-C", (*_plain("fedavg", "fedel"), _DISJOINT)),
    "resources": Experiment("Memory and energy", _EVERY, ("cifar10",)),
    "statistics": Experiment("FedEL compared with each method, paired by seed (appendix C)", _EVERY),
    "selection": Experiment("Tensors selected over the rounds", _plain("fedel", "elastictrainer")),
    "importance": Experiment("Importance of tensors across clients", _plain("fedel"), ("cifar10",)),
    "devices": Experiment(
        "Training time per round by device type", _plain("fedavg", "elastictrainer", "fedel"), ("cifar10",)
    ),
}


@dataclass(frozen=True)
class PlannedRun:
    """A simulation that an experiment needs."""

    experiment: str
    label: str
    task: str
    seed: int
    table: Mapping[str, Any]
    """The effective job, with every default written out."""

    @cached_property
    def name(self) -> str:
        """Name of its directory: readable parts, and a hash of the settings that are not at their defaults.

        So runs keep their names when jobs get a new key. If a default changes, the table in the directory is
        another one, and the run is refused there.
        """
        at_default = dict(config.leaves(_as_json(SimulationConfig.defaults(self.table["strategy"]))))
        own = {key: value for key, value in config.leaves(self.table) if at_default.get(key) != value}
        settings = json.dumps(own, sort_keys=True).encode()
        method = _method(self.table["strategy"])
        return f"{self.task}-{method}-{self.seed}-{hashlib.sha256(settings).hexdigest()[:8]}"

    @property
    def num_rounds(self) -> int:
        return int(self.table["rounds"]["num_rounds"])


def plan(experiment: str, scale: Scale, tasks: Sequence[str] = (), seeds: int = 0) -> list[PlannedRun]:
    """The runs of an experiment; first all methods with the first seed.

    ``tasks`` restricts the tasks, ``seeds`` overrides the number in the scale.
    """
    if experiment not in EXPERIMENTS:
        raise ConfigError(f"unknown experiment '{experiment}'; {nearest(experiment, EXPERIMENTS)}")
    for name in tasks:
        if name not in scale.tasks:
            raise ConfigError(f"scale {scale.name} has no task '{name}'; {nearest(name, scale.tasks)}")
    planned, setting = EXPERIMENTS[experiment], scale.experiments.get(experiment, Setting())
    runs = []
    for name in setting.tasks or planned.tasks or scale.tasks:
        if name not in scale.tasks or (tasks and name not in tasks):
            continue
        task = scale.tasks[name]
        more, usual = setting.more.get(name, {}), setting.seeds or task.seeds
        around = _around_the_preset(scale, task) if planned.leaves_out else ()
        for variant in (*planned.variants, *around):
            for seed in range(1, (seeds or more.get(variant.label, usual)) + 1):
                job = _job(overlaid(task.job, setting.job), variant, scale, task)
                job = _longer(job, setting.longer if variant.has_short_rounds else 1)
                table = effective(job, seed, f"{scale.name}: {name}")
                runs.append(PlannedRun(experiment, variant.label, name, seed, table))
    return sorted(runs, key=lambda run: run.seed)


def _around_the_preset(scale: Scale, task: Task) -> list[Variant]:
    fedel, preset = {"name": "fedel"}, _preset(scale, task)
    return [
        *(
            Variant(f"{name} with {part}", {"name": name}, change)
            for part, change in preset.items()
            for name in ("fedavg", "fedavg-cut")
            if _can_have(name, change)
        ),
        *(Variant(f"without {part}", fedel, preset=True, without=part) for part in preset),
        *(Variant(f"with {name}", fedel, change, preset=True) for name, change in scale.tried.items()),
    ]


def _preset(scale: Scale, task: Task) -> dict[str, Mapping[str, Any]]:
    return {part: change for part, change in scale.preset.items() if part not in task.preset_without}


def _can_have(method: str, change: Mapping[str, Any]) -> bool:
    """Whether a part of the preset means something to a method: the server's steps do, and its own options."""
    return set(change) <= {"server", "strategy"} and set(change.get("strategy", ())) <= set(_options(method))


def _options(method: str) -> list[str]:
    return [option.name for option in fields(METHODS[method])]


def _job(job: Mapping[str, Any], variant: Variant, scale: Scale, task: Task) -> Mapping[str, Any]:
    job = {**job, "strategy": _with_options(variant.strategy, scale)}
    method = variant.strategy["name"]
    for part, change in _preset(scale, task).items():
        if variant.preset and part != variant.without and (method == "fedel" or _can_have(method, change)):
            job = overlaid(job, change)
    return overlaid(job, variant.job)


def _longer(job: Mapping[str, Any], times: int) -> Mapping[str, Any]:
    rounds = job["rounds"]
    decay = rounds.get("lr_decay", 1.0) ** (1 / times)
    more = {"num_rounds": times * rounds["num_rounds"], "lr_decay": decay}
    return overlaid(job, {"rounds": more}) if times > 1 else job


def distinct(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Each run once, with its label from the first experiment; those with the first seed come first."""
    found: dict[str, PlannedRun] = {}
    for run in runs:
        found.setdefault(run.name, run)
    return sorted(found.values(), key=lambda run: run.seed)


def effective(job: Mapping[str, Any], seed: int, where: str) -> dict[str, Any]:
    """The job as it is stored, with the strategy's defaults, so that a changed default is noticed."""
    parsed = SimulationConfig.parse({**job, "seed": seed}, where)
    table = parsed.table()
    table["strategy"] = complete(table["strategy"])
    return _as_json(table)


def _as_json(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table as it is read back from a file."""
    plain: dict[str, Any] = json.loads(json.dumps(table))
    return plain


def _with_options(strategy: Mapping[str, Any], scale: Scale) -> dict[str, Any]:
    name = strategy["name"]
    if name not in METHODS:
        raise ConfigError(f"unknown strategy '{name}'; {nearest(name, METHODS)}")
    table = {**scale.methods.get(name, {}), **strategy}
    return {**table, "base": _with_options(strategy["base"], scale)} if "base" in strategy else table


def _method(strategy: Mapping[str, Any]) -> str:
    name = str(strategy["name"])
    return f"{name}-{_method(strategy['base'])}" if isinstance(strategy.get("base"), Mapping) else name
