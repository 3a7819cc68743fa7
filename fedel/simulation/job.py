"""What a simulation is: a run as ``fedel.job`` has it, and the devices, data, network and faults around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedel import config
from fedel.core.timing import SCOPES
from fedel.data.partition import PartitionConfig
from fedel.errors import ConfigError
from fedel.job import RunConfig
from fedel.simulation.conditions import Faults, Network
from fedel.simulation.devices import FleetConfig
from fedel.strategies import build, defaults
from fedel.training.settings import COMPUTE


@dataclass(frozen=True)
class Evaluation:
    """How the model is tested; how often is ``rounds.evaluate_every``."""

    limit: int = 0
    """Test samples, spread evenly over the test set; 0 takes all of them."""
    exits_every: int = 0
    """Measure the accuracy of each exit in every n-th round; 0: never."""


@dataclass(frozen=True)
class SimulationConfig:
    """A simulation."""

    run: RunConfig = field(default_factory=RunConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    network: Network = field(default_factory=Network)
    faults: Faults = field(default_factory=Faults)
    evaluation: Evaluation = field(default_factory=Evaluation)
    scope: str = ""
    """The clock that decides, for every method: ``backward``, as in the paper's simulation, or ``train``, the
    whole step. Empty takes the strategy's ``budget_scope``, and ``backward`` where it has none (FedAvg)."""
    device: str = "cpu"
    """Where this machine computes: ``cpu``, ``cuda``, ``cuda:1``, ..."""
    compute: str = "exact"
    """``exact``: the bits that a federation of devices gives. ``fast``: clients side by side, and images in an
    order in memory with which narrow networks train faster; sums are rounded differently."""

    def __post_init__(self) -> None:
        for name, value, words in (("scope", self.scope, ("", *SCOPES)), ("compute", self.compute, COMPUTE)):
            if value not in words:
                raise ValueError(f"{name} = {value!r} is not one of: {', '.join(filter(None, words))}")

    @staticmethod
    def parse(table: Mapping[str, Any], where: str = "job") -> SimulationConfig:
        own = {f.name for f in dataclasses.fields(SimulationConfig)} - {"run"}
        runs = {f.name for f in dataclasses.fields(RunConfig)}
        for key in table:
            if key not in own | runs:
                raise ConfigError(f"{where}: unknown key '{key}'; {config.nearest(key, own | runs)}")
        run = {key: value for key, value in table.items() if key in runs}
        settings = {key: value for key, value in table.items() if key in own}
        _fill_in(run, settings, where)
        job = dataclasses.replace(
            config.parse(SimulationConfig, settings, where), run=RunConfig.parse(run, where)
        )
        _check(job, where)
        return job

    def table(self) -> dict[str, Any]:
        """The effective configuration, every default written out."""
        settings, run = asdict(self), self.run.table()
        for of_agents in ("clients", "split"):
            run.pop(of_agents, None)
        return {**run, **{key: value for key, value in settings.items() if key != "run"}}

    @staticmethod
    def defaults(strategy: Mapping[str, Any]) -> dict[str, Any]:
        """The table of a job that says nothing but which method, whose defaults are written out too."""
        table = SimulationConfig.parse({}).table()
        return {**table, "strategy": defaults(strategy)}


def _fill_in(run: dict[str, Any], settings: dict[str, Any], where: str) -> None:
    """Defaults that follow from other settings."""
    # Nothing but [network] delays a virtual device, so a short deadline is fair.
    rounds, fleet = run.get("rounds", {}), settings.get("fleet", {})
    if isinstance(rounds, dict):
        run["rounds"] = {"deadline_floor_seconds": 0.0, **rounds}
    counts = fleet.get("counts", {}) if isinstance(fleet, dict) else {}
    partition = settings.get("partition", {})
    # What has the wrong type stays as it is: parsing it says so.
    sound = isinstance(counts, dict) and isinstance(partition, dict)
    if sound and counts and all(type(count) is int for count in counts.values()):
        settings["partition"] = {"num_clients": sum(counts.values()), **partition}
    if settings.get("scope"):
        run["strategy"] = _in_scope(run.get("strategy", {"name": "fedel"}), settings["scope"], where)


def _in_scope(strategy: Mapping[str, Any], scope: str, where: str) -> dict[str, Any]:
    """The strategy's table with its ``budget_scope``, or that of the one it wraps, set to ``scope``."""
    if not build(strategy, f"{where}: [strategy]").budget_scope:
        return dict(strategy)
    if "base" in strategy:
        return {**strategy, "base": _in_scope(strategy["base"], scope, where)}
    if strategy.get("budget_scope", scope) != scope:
        raise ConfigError(
            f"{where}: scope = {scope!r}, but the strategy's budget_scope = {strategy['budget_scope']!r}; "
            "remove one of them"
        )
    return {**strategy, "budget_scope": scope}


def _check(job: SimulationConfig, where: str) -> None:
    counted = sum(job.fleet.counts.values())
    if counted and counted != job.partition.num_clients:
        raise ConfigError(
            f"{where}: [fleet.counts] adds up to {counted} devices, but partition.num_clients = "
            f"{job.partition.num_clients}; make them equal, or leave num_clients out"
        )
