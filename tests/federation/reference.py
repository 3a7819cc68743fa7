"""The same run without a wire: the roles called directly, one after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fedel.job import RunConfig
from fedel.roles.aggregator import RoundFold
from fedel.roles.coordinator import Director, RunState
from fedel.roles.edge import KeptMemories, run_task
from fedel.types import ClientView, Memory, Tensors, Update
from tests.federation.trainers import clients_of, scale_of
from tests.strategies.fakes import initial_model


@dataclass(frozen=True)
class Reference:
    models: tuple[Tensors, ...]
    """The model before each round, and the last one."""
    updates: tuple[dict[str, Update], ...]
    """Of each round, by client; those that count alone."""

    @property
    def model(self) -> Tensors:
        return self.models[-1]


def reference(job: RunConfig, num_clients: int, counted: Sequence[Collection[str]] | None = None) -> Reference:
    """What ``job`` makes of the uneven fleet. ``counted`` tells, by round, whose updates arrive in time."""
    clients = clients_of(num_clients, scale_of(job))
    spec = next(iter(clients.values())).spec
    director, state = Director(job, spec), RunState()
    memories, accepted = {name: KeptMemories() for name in clients}, dict.fromkeys(clients, -1)
    views = [ClientView(name, c.num_samples, c.profile) for name, c in sorted(clients.items())]
    models: list[Tensors] = [initial_model(spec)]
    server_state: Tensors = {}
    rounds = []
    for round_num in range(job.rounds.num_rounds if counted is None else len(counted)):
        plan, fold = director.plan(state, views), RoundFold(director.strategy, spec)
        updates: dict[str, Update] = {}
        for task in plan.tasks:
            name = task.client
            if counted is not None and name not in counted[round_num]:
                continue
            update = run_task(
                director.strategy, task, accepted[name], Memory(), models[-1], clients[name], memories[name]
            )
            fold.add(update)
            updates[name], accepted[name] = update, round_num
        closed = fold.finish(models[-1], server_state)
        reports = [update.report for update in updates.values()]
        state = director.close(state, plan, reports, closed.global_importance)
        models.append(dict(closed.model))
        server_state = closed.state
        rounds.append(updates)
    return Reference(tuple(models), tuple(rounds))
