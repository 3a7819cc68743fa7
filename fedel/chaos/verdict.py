"""Whether a disturbed run is what an undisturbed one would have been."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedel import testing
from fedel.audit.audit import audit
from fedel.audit.books import Books, read_database
from fedel.audit.findings import Findings
from fedel.audit.shard_files import ShardFiles, read_shard
from fedel.chaos import trainer
from fedel.chaos.federation import RUN, Federation
from fedel.core.staleness import caught_up
from fedel.files import safe_name
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.types import Memory, Task, Tensors

Key = tuple[str, int]
"""Client and round of an update."""


@dataclass
class Outcome:
    """What happened in a drill, and whether all is well."""

    seed: int
    what: str
    timeline: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_covered: list[str] = field(default_factory=list)
    seconds: float = 0.0
    num_rounds: int = 0
    num_faults: int = 0
    num_acknowledged: int = 0
    num_counted: int = 0
    num_recomputed: int = 0
    folder: str = ""
    """Where its files are, if they were kept."""

    @property
    def sound(self) -> bool:
        return not self.problems


def judge(made: Federation, outcome: Outcome, *, replay: bool = True) -> None:
    """Read everything that is on disk, once all processes have ended; ``replay`` trains everything again."""
    sources = made.sources()
    found = audit(sources)
    outcome.problems += [f"audit: {finding}" for finding in found.findings]
    outcome.num_rounds, outcome.num_recomputed = found.num_rounds, found.num_recomputed
    findings = Findings()
    books = read_database(sources.database_url, RUN, findings)
    shards = [read_shard(path / "runs" / safe_name(RUN), RUN, findings) for path in sources.aggregators]
    whole = [shard for shard in shards if shard is not None]
    if len(whole) < len(shards) or books.config is None:
        return  # the audit says why
    counted = counted_updates(whole[0], books)
    outcome.num_counted = sum(len(keys) for keys in counted.values())
    receipts = set(acknowledged(made))
    outcome.num_acknowledged = len(receipts)
    outcome.problems += lost_updates(receipts, counted, books)
    if replay and found.num_recomputed == found.newest_version:
        model = undisturbed(books, counted, made.layout.num_agents)
        outcome.problems += other_bits(model, whole)


def acknowledged(made: Federation) -> Iterator[Key]:
    """Updates for which an agent got the receipts of all aggregators; its log says so."""
    for name in made.layout.agents:
        for line in _log_lines(made.processes[name].log):
            if line.get("client") == name and str(line.get("message")).startswith(
                f"round {line.get('round')}: "
            ):
                yield name, int(line["round"])


def _log_lines(path: Path) -> Iterator[dict[str, str]]:
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # cut off by a kill, or not a line of ours
        if isinstance(line, dict):
            yield line


def counted_updates(shard: ShardFiles, books: Books) -> dict[int, set[Key]]:
    """By round: the updates that counted in it."""
    counted = {
        version - 1: {(client, content.round_num) for client, content in meta.counted.items()}
        for version, meta in shard.metas.items()
        if version > 0
    }
    if not shard.max_staleness:
        for round_num, record in books.records.items():
            counted.setdefault(round_num, {(entry.client, round_num) for entry in record.clients})
    return counted


def lost_updates(receipts: set[Key], counted: dict[int, set[Key]], books: Books) -> list[str]:
    """What was acknowledged and did not count, although its round closed."""
    all_counted = set().union(*counted.values()) if counted else set()
    assert books.config is not None
    max_staleness, last = books.config.rounds.staleness.max_rounds, max(counted, default=-1)
    problems = []
    for client, round_num in sorted(receipts - all_counted):
        # It may wait for a round that never closed: the run was stopped, or its last round was over.
        in_open_round = round_num > last - max_staleness
        if not in_open_round:
            problems.append(
                f"lost: the update of {client} of round {round_num} was acknowledged, but not counted"
            )
    return problems


def undisturbed(books: Books, counted: dict[int, set[Key]], num_agents: int) -> Tensors:
    """The model that the same plans and the same counted updates make when nothing goes wrong."""
    assert books.config is not None
    scale = trainer.scale_of(books.config)
    spec, fleet, strategy = (
        trainer.spec_of(scale),
        trainer.fleet(num_agents, scale),
        build(books.config.strategy),
    )
    staleness = books.config.rounds.staleness
    models: list[Tensors] = [testing.initial_model(spec)]
    importance: dict[str, float] = {}
    state: Tensors = {}
    tasks: dict[Key, tuple[Task, Memory]] = {}
    staged: dict[Key, Memory] = {}
    accepted: dict[str, int] = {}
    for round_num in range(max(counted, default=-1) + 1):
        for task in books.plans[round_num].tasks:
            before = accepted.get(task.client, -1)
            memory = staged[task.client, before] if before >= 0 else Memory()
            tasks[task.client, round_num] = (replace(task, global_importance=importance), memory)
        fold = RoundFold(strategy, spec)
        for client, trained_in in sorted(counted[round_num]):
            task, memory = tasks[client, trained_in]
            update, staged[client, trained_in] = strategy.fit(task, models[trained_in], memory, fleet[client])
            if late := round_num - trained_in:
                weight = staleness.weight(late)
                update = caught_up(update, spec, weight, models[trained_in], models[round_num])
            fold.add(update)
            accepted[client] = trained_in
        closed = fold.finish(models[-1], state)
        models.append(closed.model)
        importance, state = closed.global_importance, closed.state
    return models[-1]


def other_bits(model: Tensors, shards: list[ShardFiles]) -> list[str]:
    problems = []
    for shard in shards:
        newest = shard.tensors(shard.newest)
        names = [name for name, values in newest.items() if values.tobytes() != model[name].tobytes()]
        if names:
            where = shard.versions.path(shard.newest)
            problems.append(f"{where}: '{names[0]}' has other bits than in an undisturbed run")
    return problems
