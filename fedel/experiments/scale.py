"""A scale: the size of the experiments, from a TOML file (in ``scales/``, or your own)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedel import config
from fedel.errors import ConfigError

SCALES = Path(__file__).with_name("scales")
METRICS = ("accuracy", "perplexity")


@dataclass(frozen=True)
class Task:
    """A workload of the paper and its fleet."""

    title: str
    job: Mapping[str, Any]
    """The job of a simulation, without seed and strategy."""
    seeds: int = 1
    """Number of runs per method, with the seeds 1, 2, ..."""
    metric: str = "accuracy"
    """``accuracy``, or ``perplexity``, which is the exponential of the test loss."""
    memory: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the job when memory is measured: a model can be too large to train, but not to measure."""
    preset_without: tuple[str, ...] = ()
    """Parts of the preset that are not for this task."""
    cuts: str = ""
    """What is smaller than in the paper, in plain words."""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric = {self.metric!r} is not one of: {', '.join(METRICS)}")
        if self.seeds < 1:
            raise ValueError(f"seeds = {self.seeds}: at least one run of every method is needed")


@dataclass(frozen=True)
class Setting:
    """What differs in one experiment from the settings of the tasks."""

    tasks: tuple[str, ...] = ()
    """The tasks to use; empty means the default of the experiment."""
    seeds: int = 0
    """Number of seeds; 0 means that of the task."""
    more: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Seeds of single variants of a task, by their labels, where a claim needs more of them and the other
    variants do not."""
    job: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the job of the task."""
    longer: int = 1
    """Multiplies the rounds of methods whose rounds take about T_th, so that they are compared for longer; the
    learning rate ends at the same value."""


@dataclass(frozen=True)
class Power:
    """Electric power of a device, in watts."""

    busy: float
    idle: float


@dataclass(frozen=True)
class Scale:
    note: str
    """What the scale is for, and how it differs from the paper."""
    tasks: Mapping[str, Task]
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of a method, for all experiments."""
    preset: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The FedEL that is recommended, part by part: each is a change to the job, its strategy included. The
    experiments ``headline`` and ``ablation`` use it."""
    tried: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changes to the preset that were tried and not taken; the experiment ``ablation`` shows what each does."""
    experiments: Mapping[str, Setting] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why a claim does not hold, by a part of its words; the page shows it where that is so."""
    power: Mapping[str, Power] = field(default_factory=dict)
    """Per device type."""
    power_source: str = ""
    """Source of the power values."""
    name: str = ""

    def __post_init__(self) -> None:
        for name, of in self.tasks.items():
            for part in of.preset_without:
                if part not in self.preset:
                    why = f"the preset has no part '{part}'; {config.nearest(part, self.preset)}"
                    raise ValueError(f"tasks.{name}.preset_without: {why}")
        for name, setting in self.experiments.items():
            for task in (*setting.tasks, *setting.more):
                if task not in self.tasks:
                    raise ValueError(
                        f"experiments.{name}: unknown task '{task}'; {config.nearest(task, self.tasks)}"
                    )


def load(name: str) -> Scale:
    """Read the scale with that name, or from that TOML file."""
    path = Path(name) if name.endswith(".toml") else SCALES / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in SCALES.glob("*.toml")))
        raise ConfigError(f"there is no scale '{name}'; use one of {known}, or a TOML file of your own")
    return config.parse(Scale, {**config.read(path), "name": path.stem}, str(path))


def overlaid(table: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the values of another one on top, section by section.

    >>> overlaid({"work": {"lr": 0.1, "momentum": 0.9}}, {"work": {"lr": 0.2}, "seed": 1})
    {'work': {'lr': 0.2, 'momentum': 0.9}, 'seed': 1}
    """
    merged = dict(table)
    for key, value in over.items():
        below = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(below, Mapping)
        merged[key] = overlaid(below, value) if both else value  # type: ignore[arg-type]
    return merged
