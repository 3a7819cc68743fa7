"""A closed round as the spans of a trace, made from its record: no round measures anything for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from fedel.records import DEVICE_PHASES, ClientRecord, RoundRecord

MAX_CLIENTS = 100
"""Clients of a round that have spans: the slowest."""
Value = str | int | float | bool


@dataclass(frozen=True)
class Span:
    name: str
    start: float
    """Unix seconds."""
    seconds: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[Mapping[str, Value], ...] = ()
    """Each has a ``name``; all are at the end of the span."""
    children: tuple[Span, ...] = ()


def spans_of(run: str, record: RoundRecord) -> Span:
    """The round, from its plan to its new model. The test of the model goes on beside the next round."""
    slowest = sorted(record.clients, key=lambda entry: -sum(entry.phases.values()))
    shown = slowest[:MAX_CLIENTS]
    return Span(
        "round",
        record.opened_at,
        record.latency_seconds,
        _known(
            {
                "fedel.run": run,
                "fedel.round": record.round,
                "fedel.version": record.version,
                "fedel.strategy": record.strategy,
                "fedel.num_updates": record.num_updates,
                "fedel.loss": record.loss,
                "fedel.accuracy": record.accuracy,
                "fedel.bytes_up": record.bytes_up,
                "fedel.bytes_down": record.bytes_down,
                "fedel.num_clients_without_span": len(slowest) - len(shown) or None,
            }
        ),
        tuple(
            {"name": "lost", "fedel.client": client, "reason": why} for client, why in record.refused.items()
        ),
        (_plan(record), *(_task(record, entry) for entry in shown), *_at_the_servers(record)),
    )


def _plan(record: RoundRecord) -> Span:
    """When it was made; how long that took is not on record."""
    about = {"fedel.num_tasks": record.num_tasks, "fedel.budget_seconds": record.budget_seconds}
    return Span("plan", record.opened_at, 0.0, {**about, "fedel.deadline_seconds": record.deadline_seconds})


def _task(record: RoundRecord, entry: ClientRecord) -> Span:
    """As the client measured it, one phase after the other from the opening of the round on."""
    begin, phases = record.opened_at, list[Span]()
    for name in DEVICE_PHASES:
        if seconds := entry.phases.get(name):
            phases.append(Span(name, begin, seconds))
            begin += seconds
    end, front = entry.window or (None, None)
    about = {
        "fedel.client": entry.client,
        "fedel.device_type": entry.device_type,
        "fedel.window_end": end,
        "fedel.window_front": front,
        "fedel.num_steps": entry.num_steps,
        "fedel.loss": entry.loss,
        "fedel.deviation": entry.deviation,
        "fedel.staleness": entry.staleness or None,
        "fedel.bytes_up": entry.bytes_up,
        "fedel.bytes_down": entry.bytes_down,
    }
    return Span("task", record.opened_at, begin - record.opened_at, _known(about), (), tuple(phases))


def _at_the_servers(record: RoundRecord) -> Iterator[Span]:
    """From the last update to the new model. Updates are folded as they come: the fold is placed before the
    commit, and the test after it."""
    sealed, made = record.opened_at + record.collect_seconds, record.opened_at + record.latency_seconds
    commit, fold = record.phases.get("commit", 0.0), record.phases.get("fold", 0.0)
    committing = max(sealed, made - commit)
    yield Span("seal", sealed, committing - sealed)
    yield Span("fold", max(record.opened_at, committing - fold), fold)
    yield Span("commit", committing, made - committing)
    if record.evaluate_seconds is not None:
        about = _known({"fedel.accuracy": record.accuracy, "fedel.loss": record.test_loss})
        yield Span("evaluate", made, record.evaluate_seconds, about)


def _known(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    return {key: value for key, value in attributes.items() if value is not None}
