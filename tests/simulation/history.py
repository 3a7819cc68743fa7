"""Rounds played by the simulation on the fake fleet, with all that happened: the reference for tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedel.core.timing import budget, full_steps
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.roles.coordinator import RoundEngine
from fedel.roles.planner import Handover, RoundPlanner
from fedel.simulation.conditions import Faults, Link
from fedel.simulation.executors import Serial
from fedel.simulation.run import Simulation
from fedel.simulation.store import Checkpoint
from fedel.simulation.workers import Outcome, Worker
from fedel.strategies.base import DEVICE_CLOCK
from fedel.strategies.server_steps import averages
from fedel.types import ClientView, LocalWork, Memory, Plan, Report, Strategy, Tensors, Update
from tests.simulation.fakes import FakeWorkload, clients_of
from tests.strategies.fakes import WORK, fleet, initial_model


@dataclass(frozen=True)
class History:
    """What happened in a run."""

    model: Tensors
    models: tuple[Tensors, ...]
    """The model before each round."""
    plans: tuple[Plan, ...]
    counted: tuple[dict[str, Update], ...]
    """The updates that count in each round, by client, in the order of the plan."""
    memories: Mapping[str, Memory]
    budget_seconds: float
    records: tuple[RoundRecord, ...]
    state: Tensors = field(default_factory=dict)
    """Server-side tensors at the end."""

    @property
    def published(self) -> Tensors:
        """What a user gets: the average, if the run has one."""
        return {**self.model, **averages(self.state)}

    @property
    def updates(self) -> list[list[Update]]:
        return [list(updates.values()) for updates in self.counted]

    @property
    def reports(self) -> list[Report]:
        return [update.report for updates in self.updates for update in updates]


@dataclass(frozen=True)
class Script(Faults):
    """Faults that a test chooses."""

    away: Mapping[int, Collection[str]] = field(default_factory=dict)
    """By round: clients that never come back."""
    broken: Mapping[int, Collection[str]] = field(default_factory=dict)
    """By round: clients whose task fails."""
    slow: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By round: how many times slower a client is than its profile says."""

    def drops_out(self, seed: int, round_num: int, client: str) -> bool:
        return client in self.away.get(round_num, ())

    def fails(self, seed: int, round_num: int, client: str) -> bool:
        return client in self.broken.get(round_num, ())

    def drift(self, seed: int, round_num: int, client: str) -> float:
        return self.slow.get(round_num, {}).get(client, 1.0)


class _Planner(RoundPlanner):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.plans: list[Plan] = []

    def plan(self, handover: Handover, clients: Sequence[ClientView], busy: Collection[str] = ()) -> Plan:
        self.plans.append(super().plan(handover, clients, busy))
        return self.plans[-1]


class _Executor(Serial):
    """Keeps every update; hands them on last one first if ``backwards``."""

    def __init__(self, worker: Worker, backwards: bool) -> None:
        super().__init__(worker)
        self.updates: dict[tuple[int, str], Update] = {}
        self._backwards = backwards

    def run(self, items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        results = list(super().run(items))
        for _, result in results:
            if isinstance(result, Outcome):
                report = result.update.report
                self.updates[report.round_num, report.client] = result.update
        return iter(results[::-1] if self._backwards else results)


def play_run(
    run: RunConfig,
    trainers: Mapping[str, Any],
    *,
    clock: str = DEVICE_CLOCK,
    strategy: Strategy | None = None,
    faults: Faults | None = None,
    link: Link | None = None,
    backwards: bool = False,
    held_out: Mapping[str, int] | None = None,
) -> History:
    """Play a run from its first model to its end."""
    workload = FakeWorkload(trainers)
    planner = _Planner(run, workload.spec, clock, strategy)
    executor = _Executor(Worker(planner.strategy, workload), backwards)
    start = Checkpoint(initial_model(workload.spec))
    clients = [replace(c, num_held_out=(held_out or {}).get(c.name, 0)) for c in clients_of(trainers, link)]
    simulation = Simulation(RoundEngine(planner), clients, executor, start, faults=faults)
    models, records, counted = [], [], []
    while not simulation.is_over:
        models.append(simulation.checkpoint.model)
        record = simulation.play()
        reports = simulation.checkpoint.handover.reports
        names = {entry.client for entry in record.clients}
        order = [task.client for task in planner.plans[-1].tasks if task.client in names]
        order += sorted(names - set(order))
        counted.append({name: executor.updates[reports[name].round_num, name] for name in order})
        records.append(record)
    memories = {**dict.fromkeys(trainers, Memory()), **simulation.checkpoint.memories}
    budget_seconds = planner.plans[0].tasks[0].budget_seconds
    return History(
        simulation.checkpoint.model,
        tuple(models),
        tuple(planner.plans),
        tuple(counted),
        memories,
        budget_seconds,
        tuple(records),
        simulation.checkpoint.fold_state,
    )


def run_rounds(
    strategy: Strategy,
    num_rounds: int = 5,
    clients: Mapping[str, Any] | None = None,
    *,
    seed: int = 1,
    num_participants: int = 0,
    work: LocalWork = WORK,
    budget_seconds: float = 0.0,
    scope: str = "backward",
    backwards: bool = False,
) -> History:
    """Rounds of a strategy without a deadline of their own; a budget of 0 is the fastest client's."""
    clients = clients or fleet()
    seconds = budget_seconds or budget(full_steps([c.profile for c in clients.values()], scope))
    table = {
        "seed": seed,
        "rounds": {
            "num_rounds": num_rounds,
            "num_participants": num_participants,
            "deadline_factor": 1e12,
            "deadline_floor_seconds": 0.0,
        },
        "budget": {"policy": "fixed", "value": seconds},
        "work": vars(work),
    }
    return play_run(RunConfig.parse(table), clients, clock=scope, strategy=strategy, backwards=backwards)
