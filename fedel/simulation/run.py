"""A run on the virtual clock: plan, train, fold, as the services do it, and write down what came of it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedel.core.timing import SCOPES
from fedel.errors import UpdateRefused
from fedel.roles.aggregator import RoundFold
from fedel.roles.coordinator import Director
from fedel.simulation import clock
from fedel.simulation.conditions import Faults
from fedel.simulation.devices import Client
from fedel.simulation.executors import Executor
from fedel.simulation.job import Evaluation
from fedel.simulation.store import Standing
from fedel.simulation.workers import Exam, Marks, Order, Outcome
from fedel.types import ClientView, Memory, Patch, Plan, Report, Task, Update

TEST_PARTS = 8
"""A test is cut into so many parts, whatever the number of workers: sums are then rounded alike."""

Progress = Callable[[int, int], None]
"""Called with the clients of a round done and to do."""


@dataclass
class _Round:
    """What comes in during one round."""

    plan: Plan
    fold: RoundFold
    deadline_seconds: float
    dropped: tuple[str, ...]
    bytes_down: Mapping[str, int]
    bytes_up: dict[str, int] = field(default_factory=dict)
    spent: dict[str, clock.Spent] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    memories: dict[str, Memory] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, Update] = field(default_factory=dict)
    """Updates of which it is not yet known whether they count."""

    def add(self, update: Update) -> None:
        try:
            self.fold.add(update)
        except UpdateRefused as error:
            self.refused[update.report.client] = str(error)


class Simulation:
    """Plays the rounds of one run; ``standing`` is where it stands."""

    def __init__(
        self,
        director: Director,
        clients: Sequence[Client],
        executor: Executor,
        standing: Standing,
        *,
        faults: Faults | None = None,
        evaluation: Evaluation | None = None,
        num_test_samples: int = 0,
    ) -> None:
        self._director = director
        self._clients = {client.name: client for client in clients}
        self._executor = executor
        self._faults = faults or Faults()
        self._evaluation = evaluation or Evaluation()
        self._num_test_samples = num_test_samples
        # In forward order, whatever order a file has brought it in.
        self.standing = replace(standing, model={t.name: standing.model[t.name] for t in director.spec.tensors})
        executor.publish(self.standing.model)

    @property
    def is_over(self) -> bool:
        return self.standing.state.round_num >= self._director.run.rounds.num_rounds

    def play(self, progress: Progress | None = None) -> dict[str, Any]:
        """One round; returns its line of ``rounds.jsonl``."""
        begin, before = time.perf_counter(), self.standing
        plan = self._director.plan(before.state, [_view(client) for client in self._clients.values()])
        plan = replace(plan, state=json.loads(json.dumps(plan.state)))  # what a resumed run would find
        round_ = self._open(plan)
        orders = [self._order(task) for task in plan.tasks if task.client not in round_.dropped]
        for done, (_, outcome) in enumerate(self._executor.run(orders), start=1):
            self._take(round_, outcome)
            if progress:
                progress(done, len(orders))
        closing = self._close(round_)
        record = self._record(round_, closing, before)
        record |= self._tested()
        return record | {"wall_seconds": time.perf_counter() - begin}

    def _open(self, plan: Plan) -> _Round:
        run, round_num = self._director.run, self.standing.state.round_num
        names = [task.client for task in plan.tasks]
        dropped = tuple(name for name in names if self._faults.drops_out(run.seed, round_num, name))
        fold = RoundFold(self._director.strategy, self._director.spec)
        return _Round(plan, fold, plan.deadline_seconds, dropped, self._bytes_down(names))

    def _bytes_down(self, names: Iterable[str]) -> dict[str, int]:
        """What changed since each client last had the model; everything for one that never had it."""
        versions, held = self.standing.versions, self.standing.held
        sizes = {t.name: t.size * np.dtype(t.dtype).itemsize for t in self._director.spec.tensors}
        return {
            name: sum(n for tensor, n in sizes.items() if versions.get(tensor, 0) > held.get(name, -1))
            for name in names
        }

    def _order(self, task: Task) -> Order:
        last = self.standing.state.reports.get(task.client)
        accepted = last.round_num if last else -1
        return Order(task, accepted, self.standing.memories.get(task.client, Memory()))

    def _take(self, round_: _Round, outcome: Outcome) -> None:
        """An update is folded at once if it counts whatever else comes, so that memory does not grow."""
        client, report = self._clients[outcome.update.report.client], outcome.update.report
        bytes_up = sum(patch_bytes(patch) for patch in outcome.update.patches.values())
        seed, name = self._director.run.seed, client.name
        spent = clock.spent(
            report,
            self._faults.drift(seed, report.round_num, name),
            client.link.seconds(bytes_up, round_.bytes_down[name]),
        )
        scope = self._director.scope
        # Seconds and memory of the machine that simulates say nothing of the device.
        report = replace(report, train_seconds=spent.training(scope), peak_memory_bytes=0)
        update = replace(outcome.update, report=report)
        round_.bytes_up[name], round_.spent[name] = bytes_up, spent
        round_.reports[name], round_.memories[name] = report, outcome.memory
        everyone = not self._director.enough(len(round_.plan.tasks) - 1, len(round_.plan.tasks))
        if everyone and clock.in_time(spent.total(scope), round_.deadline_seconds):
            round_.add(update)
        else:
            round_.waiting[name] = update

    def _close(self, round_: _Round) -> clock.Closing:
        scope, num_tasks = self._director.scope, len(round_.plan.tasks)
        closing = clock.close(
            [(spent.total(scope), name) for name, spent in round_.spent.items()],
            lambda count: self._director.enough(count, num_tasks),
            round_.deadline_seconds,
            self._director.run.rounds.min_reports,
        )
        for name in closing.counted:
            if name in round_.waiting:
                round_.add(round_.waiting.pop(name))
        before = self.standing
        closed = round_.fold.finish(before.model, before.fold_state)
        changed = {name: new for name, new in closed.model.items() if new is not before.model[name]}
        self._executor.publish(changed)
        reports = self._counted(round_, closing)
        state = self._director.close(before.state, round_.plan, reports, closed.global_importance)
        tasks = round_.plan.tasks
        self.standing = Standing(
            closed.model,
            state,
            closed.state,
            {**before.memories, **{r.client: round_.memories[r.client] for r in reports}},
            {**before.versions, **dict.fromkeys(changed, state.round_num)},
            {**before.held, **{task.client: before.state.round_num for task in tasks}},
        )
        return closing

    def _counted(self, round_: _Round, closing: clock.Closing) -> list[Report]:
        """In the order of the plan, so that sums over them do not depend on who came first."""
        counted = set(closing.counted) - round_.refused.keys()
        return [round_.reports[task.client] for task in round_.plan.tasks if task.client in counted]

    def _record(self, round_: _Round, closing: clock.Closing, before: Standing) -> dict[str, Any]:
        director = self._director
        record = director.record(before.state, round_.plan, self._counted(round_, closing))
        clocks = {
            scope: max((round_.spent[name].total(scope) for name in closing.counted), default=0.0)
            for scope in SCOPES
        }
        return record | {
            "clients": [self._entry(entry, round_) for entry in record["clients"]],
            "latency_seconds": closing.seconds,
            "scope": director.scope,
            "clock_seconds": clocks | {director.scope: closing.seconds},
            "deadline_seconds": round_.deadline_seconds,
            "dropped": list(round_.dropped),
            "late": list(closing.late),
            "refused": round_.refused,
            "bytes_up": sum(round_.bytes_up[name] for name in closing.counted),
            "bytes_down": sum(round_.bytes_down.values()),
        }

    def _entry(self, entry: dict[str, Any], round_: _Round) -> dict[str, Any]:
        name, spent = entry["client"], round_.spent[entry["client"]]
        return entry | {
            "device_type": self._clients[name].device,
            "clock_seconds": {scope: spent.training(scope) for scope in SCOPES},
            "network_seconds": spent.network_seconds,
            "bytes_up": round_.bytes_up[name],
            "bytes_down": round_.bytes_down[name],
        }

    def _tested(self) -> dict[str, Any]:
        """Accuracy and loss of the new model, if it is its turn to be tested."""
        rounds, done = self._director.run.rounds, self.standing.state.round_num
        due = rounds.evaluate_every and (done % rounds.evaluate_every == 0 or self.is_over)
        if not due or not self._num_test_samples:
            return {"accuracy": None, "test_loss": None}
        average = self._director.strategy.exits_to_average(self._director.spec)
        (score,) = self._exam(average)
        found: dict[str, Any] = {"accuracy": score.accuracy, "test_loss": score.loss}
        every = self._evaluation.exits_every
        if every and (done % every == 0 or self.is_over):
            found["exit_accuracies"] = [exit_.accuracy for exit_ in self._exam(each_exit=True)]
        return found

    def _exam(self, average: tuple[int, ...] = (), each_exit: bool = False) -> list[Score]:
        limit = self._evaluation.limit
        num_parts = min(TEST_PARTS, limit or self._num_test_samples, self._num_test_samples)
        exams = [Exam(part, num_parts, limit, average, each_exit) for part in range(num_parts)]
        parts: dict[int, Sequence[Marks]] = dict(self._executor.run(exams))
        return [Score.of(marks) for marks in zip(*(parts[i] for i in range(num_parts)), strict=True)]


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float

    @staticmethod
    def of(marks: Sequence[Marks]) -> Score:
        targets = max(1, sum(m.num_targets for m in marks))
        return Score(
            sum(m.num_correct for m in marks) / targets, math.fsum(m.loss_sum for m in marks) / targets
        )


def patch_bytes(patch: Patch) -> int:
    """Bytes on the wire: the values, and a bit for every place where a mask says which they are.

    >>> three = np.zeros(3, np.float32)
    >>> patch_bytes(Patch(three)), patch_bytes(Patch(three, np.ones(9, bool)))
    (12, 14)
    """
    mask = -(-patch.where.size // 8) if isinstance(patch.where, np.ndarray) else 0
    return patch.values.nbytes + mask


def _view(client: Client) -> ClientView:
    return ClientView(client.name, client.num_samples, client.profile)
