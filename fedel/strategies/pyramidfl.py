"""PyramidFL (Li et al., 2022): Oort's choice of clients, then more steps for the fast ones (algorithms 8).

All chosen clients train the whole model. A client that would wait for the slowest of them trains more steps
instead, and clients whose updates matter less leave tensors out of their upload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import ClassVar

from fedel.core import oort
from fedel.core.timing import SLACK
from fedel.seeds import generator
from fedel.strategies.base import (
    WEIGHTINGS,
    MeanFold,
    Method,
    check_scope,
    draw,
    one_of,
    task_for,
    train_spec_for,
    update_of,
    whole,
    whole_step,
)
from fedel.types import (
    ClientView,
    Fold,
    Memory,
    ModelSpec,
    Patch,
    Plan,
    Role,
    RoundContext,
    Task,
    Tensors,
    Trainer,
    Update,
)

MAX_EXTRA = 10
"""A fast client adds at most this many times the common number of steps."""
MAX_PASSES = 5
"""Nor does it go through its own data more often than this, unless the common number of steps does."""


@dataclass(frozen=True)
class Ledger:
    """What the planner knows of the clients; it travels from plan to plan as JSON."""

    exploration: float
    round_threshold: float
    utilities: Mapping[str, float] = field(default_factory=dict)
    durations: Mapping[str, float] = field(default_factory=dict)
    last_rounds: Mapping[str, int] = field(default_factory=dict)
    """Counted from 1."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """Size of each client's last update times the samples behind it, in hundreds."""
    exploited: Sequence[str] = ()
    """Known clients chosen last time, and ..."""
    passed_over: Sequence[str] = ()
    """... clients invited last time but too slow to be among those kept."""
    history: Sequence[float] = ()
    """Utility that exploited clients brought in, round by round."""


@dataclass(frozen=True)
class PyramidFL(Method):
    name: ClassVar[str] = "pyramidfl"

    over_commit: float = 1.3
    """Clients invited for each one kept; the fastest are kept."""
    exploration: float = 0.9
    """Share of the places for new clients at first."""
    exploration_decay: float = 0.95
    """What is left of that share from one round to the next."""
    exploration_min: float = 0.2
    """The least that share comes to."""
    clip: float = 0.98
    """Utilities above this quantile count as the quantile."""
    cut_off: float = 0.7
    """Clients with less than this share of the last score that gets in are not drawn."""
    round_penalty: float = 2.0
    """Exponent of the penalty on clients slower than preferred; 0 switches it off."""
    round_threshold: float = 30.0
    """Percentile of all durations that is preferred at first."""
    pacer_rounds: int = 20
    """Rounds after which that percentile is looked at again."""
    pacer_delta: float = 5.0
    """By how much the percentile then moves."""
    step_bonus: float = 1.0
    """Share of its waiting time that a fast client fills with steps."""
    drop_low: float = 0.0
    """Share of tensors left out by the client whose update matters most."""
    drop_high: float = 0.0
    """The same for the one whose update matters least; the reference goes from 0.1 to 0.6."""
    comm_seconds: float = 0.0
    """Seconds to send the whole model."""
    mask_aware: bool = False
    """Average a tensor over those who sent it; otherwise leaving it out counts as no change."""
    budget_scope: str = "backward"
    """What counts as time: ``backward``, as in the paper's simulation, or ``train``, the whole step."""
    weighting: str = "uniform"
    """How much a client counts in the mean: ``uniform`` or ``samples``."""

    def __post_init__(self) -> None:
        for name in ("exploration", "exploration_decay", "exploration_min", "clip", "cut_off", "step_bonus"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name):g}: a share lies between 0 and 1")
        if not 0 <= self.drop_low <= self.drop_high <= 1:
            raise ValueError(
                f"drop_low = {self.drop_low:g}, drop_high = {self.drop_high:g}: they rise within 0 to 1"
            )
        if self.over_commit < 1:
            raise ValueError(f"over_commit = {self.over_commit:g}: at least 1, who is needed is invited")
        if self.pacer_rounds < 1:
            raise ValueError(f"pacer_rounds = {self.pacer_rounds}: the pacer looks at 1 round or more")
        if not 0 < self.round_threshold <= 100:
            raise ValueError(f"round_threshold = {self.round_threshold:g}: a percentile above 0 and up to 100")
        for name in ("round_penalty", "pacer_delta", "comm_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name):g}: it does not go below 0")
        check_scope(self.budget_scope)
        one_of("weighting", self.weighting, WEIGHTINGS)

    def plan(self, context: RoundContext) -> Plan:
        ledger = self._learn(context)
        wanted = min(context.num_participants or len(context.clients), len(context.clients))
        num_invited = min(len(context.clients), math.ceil(wanted * self.over_commit - SLACK))
        invited, exploited = self._invite(context, ledger, num_invited)
        invited.sort(key=lambda client: ledger.durations[client.name])
        kept = {client.name for client in invited[:wanted]}
        ledger = replace(
            ledger,
            exploited=[name for name in exploited if name in kept],
            passed_over=[client.name for client in invited[wanted:]],
        )
        clients = [client for client in context.clients if client.name in kept]
        return Plan(tuple(self._tasks(context, ledger, clients)), state=asdict(ledger))

    def fit(self, task: Task, model: Tensors, memory: Memory, trainer: Trainer) -> tuple[Update, Memory]:
        spec = trainer.spec
        train_spec = train_spec_for(task, trainer, {t.name for t in spec.weights}, whole(spec))
        trained = trainer.train(model, train_spec)
        update = update_of(task, model, trainer, train_spec, trained, whole_step(spec, trainer.profile))
        return replace(update, patches=_thinned(spec, task, update.patches)), memory

    def fold(self, spec: ModelSpec) -> Fold:
        return MeanFold(spec, self.weighting, damping=0.0 if self.mask_aware else 1.0)

    def _learn(self, context: RoundContext) -> Ledger:
        """The ledger after the reports of the last round."""
        if not context.state:
            fresh = Ledger(self.exploration, self.round_threshold)
            return replace(fresh, durations=self._durations(context))
        old = Ledger(**context.state)
        utilities, last_rounds, norms = dict(old.utilities), dict(old.last_rounds), dict(old.norms)
        news: dict[str, float] = {}
        for client in context.clients:
            report = client.last
            if report is None or report.round_num < last_rounds.get(client.name, 0):
                continue
            trained_samples = report.num_steps * context.work.batch_size
            news[client.name] = oort.utility(report.loss_square, report.num_samples, trained_samples)
            norms[client.name] = report.update_norm * min(report.num_samples, trained_samples) / 100
            last_rounds[client.name] = report.round_num + 1
        utilities.update(news)
        for name in old.passed_over if news else ():
            utilities[name] = sum(news.values()) / len(news)
            last_rounds[name] = context.round_num
        brought = sum(news.get(name, 0.0) for name in old.exploited)
        history = [*old.history, brought][-2 * self.pacer_rounds :]
        threshold = oort.pace(
            old.round_threshold, history, context.round_num, self.pacer_rounds, self.pacer_delta
        )
        return Ledger(
            exploration=max(old.exploration * self.exploration_decay, self.exploration_min),
            round_threshold=threshold,
            utilities=utilities,
            durations={**old.durations, **self._durations(context)},
            last_rounds=last_rounds,
            norms=norms,
            history=history,
        )

    def _durations(self, context: RoundContext) -> dict[str, float]:
        """Seconds in which each client trains the common number of steps and sends the model."""
        return {c.name: self._local_seconds(context, c) + self.comm_seconds for c in context.clients}

    def _local_seconds(self, context: RoundContext, client: ClientView) -> float:
        step = whole_step(context.spec, client.profile).total(self.budget_scope)
        return step * context.work.steps_for(client.num_samples)

    def _invite(self, context: RoundContext, ledger: Ledger, count: int) -> tuple[list[ClientView], list[str]]:
        """Clients to invite, and which of them are known already; the first round is drawn at random."""
        if not ledger.utilities:
            return draw(replace(context, num_participants=count)), []
        rng = generator(context.seed, "pyramidfl", context.round_num)
        preferred = oort.preferred_seconds(list(ledger.durations.values()), ledger.round_threshold)
        scored = oort.scores(
            {c.name: ledger.utilities[c.name] for c in context.clients if c.name in ledger.utilities},
            ledger.last_rounds,
            ledger.durations,
            context.round_num + 1,
            preferred,
            self.round_penalty,
            self.clip,
        )
        known = oort.exploit(scored, int(count * (1 - ledger.exploration)), self.cut_off, rng)
        rewards = {
            c.name: c.num_samples * oort.penalty(ledger.durations[c.name], preferred, self.round_penalty)
            for c in context.clients
            if c.name not in scored
        }
        new = oort.explore(rewards, count - len(known), rng)
        rest = [c.name for c in context.clients if c.name not in {*known, *new}]
        missing = rng.permutation(len(rest))[: count - len(known) - len(new)]
        chosen = {*known, *new, *(rest[i] for i in missing)}
        return [client for client in context.clients if client.name in chosen], known

    def _tasks(self, context: RoundContext, ledger: Ledger, clients: Sequence[ClientView]) -> list[Task]:
        """Upload drop by the rank of the last update, then steps that fill the time to the slowest's end."""
        # A client without a past update is not made to drop any of its first.
        ranked = sorted(clients, key=lambda client: -ledger.norms.get(client.name, math.inf))
        rank = {client.name: i for i, client in enumerate(ranked)}
        spread = (self.drop_high - self.drop_low) / max(1, len(clients))
        drops = [self.drop_low + rank[client.name] * spread for client in clients]
        local = [self._local_seconds(context, client) for client in clients]
        done = [seconds + (1 - p) * self.comm_seconds for seconds, p in zip(local, drops, strict=True)]
        tasks = []
        for client, p, seconds, t in zip(clients, drops, local, done, strict=True):
            steps = context.work.steps_for(client.num_samples)
            num_steps = local_steps(steps, seconds, max(done) - t, self.step_bonus)
            num_batches = -(-client.num_samples // context.work.batch_size)
            num_steps = min(num_steps, max(MAX_PASSES * num_batches, steps))
            tasks.append(task_for(context, client, {"drop": p}, num_steps=num_steps))
        return tasks


def local_steps(steps: int, local_seconds: float, waiting_seconds: float, bonus: float = 1.0) -> int:
    """``steps``, which take ``local_seconds``, and as many more as fit in the waiting time.

    >>> local_steps(5, local_seconds=10, waiting_seconds=20)
    15
    """
    if local_seconds <= 0:
        return steps
    extra = math.floor(waiting_seconds / (local_seconds / steps) * (1 + SLACK))
    return steps + int(min(MAX_EXTRA * steps, bonus * extra))


def _thinned(spec: ModelSpec, task: Task, patches: Mapping[str, Patch]) -> dict[str, Patch]:
    """The patches, each trained tensor left out with the probability the plan gave; statistics always go."""
    rng = generator(task.seed, "drop")
    kept = {}
    for t in spec.tensors:
        if t.name in patches and (t.role is Role.BUFFER or rng.random() >= task.settings["drop"]):
            kept[t.name] = patches[t.name]
    return kept
