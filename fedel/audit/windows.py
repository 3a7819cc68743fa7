"""Whether every client's windows follow one another as the method's rules say (``fedel.core.window``)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from fedel.audit.books import Books
from fedel.audit.findings import ILLEGAL, Findings
from fedel.core.budgeted import Prices
from fedel.records import ClientRecord
from fedel.strategies import build
from fedel.strategies.fedel import FedEL
from fedel.types import ModelSpec, Strategy, Task, Window


@dataclass(frozen=True)
class _Round:
    """One client in one round that it counted in."""

    round_num: int
    entry: ClientRecord
    window: Window
    task: Task | None
    """``None`` where the plan is not known."""


def check_windows(books: Books, findings: Findings) -> None:
    """Without the spec (no database) there is nothing to hold them against."""
    spec = books.spec
    if spec is None or books.config is None:
        return
    method = _innermost(build(books.config.strategy))
    history: dict[str, list[_Round]] = {}
    for round_num, record in sorted(books.records.items()):
        tasks = {task.client: task for task in books.plans[round_num].tasks} if round_num in books.plans else {}
        for entry in record.clients:
            if entry.window is not None:
                task, window = tasks.get(entry.client), Window(*entry.window)
                history.setdefault(entry.client, []).append(_Round(round_num, entry, window, task))
    for client, rounds in history.items():
        for each in rounds:
            _check_inside(books, client, each, spec, findings)
        # A late update was made for the task of an earlier round.
        if isinstance(method, FedEL) and not books.config.rounds.staleness.max_rounds:
            _check_first(books, client, rounds[0], method, findings)
            for before, after in pairwise(rounds):
                _check_slide(books, client, before, after, method, findings)


def _innermost(strategy: Strategy) -> Strategy:
    """The method that FedProx and FedNova wrap."""
    base: Strategy | None = getattr(strategy, "base", None)
    return strategy if base is None else _innermost(base)


def _check_inside(books: Books, client: str, each: _Round, spec: ModelSpec, findings: Findings) -> None:
    where, window = books.at(each.round_num), each.window
    if not 1 <= window.end <= window.front <= spec.num_blocks:
        said = f"{window.end}-{window.front}"
        findings.add(ILLEGAL, where, f"client '{client}' has the window {said} of {spec.num_blocks} blocks")
        return
    outside = [n for n in each.entry.selected if n not in spec.by_name or spec.by_name[n].block not in window]
    if outside:
        findings.add(ILLEGAL, where, f"client '{client}' trained '{outside[0]}' outside its window")


def _check_first(books: Books, client: str, first: _Round, method: FedEL, findings: Findings) -> None:
    end = 1 if method.start == "first" else first.window.end
    expected = _by_rules(books, client, None, first, method) or Window(end, first.window.front)
    if first.window != expected or first.entry.resets:
        _report(books, client, first, expected, findings)


def _check_slide(
    books: Books, client: str, before: _Round, after: _Round, method: FedEL, findings: Findings
) -> None:
    assert books.spec is not None
    last, held = books.spec.num_blocks, method.variant == "no-rollback"
    if held and before.window == after.window:
        return
    was_last = before.window.front >= last
    end = 1
    if not was_last:
        blocks = {books.spec.by_name[n].block for n in before.entry.selected if n in books.spec.by_name}
        leaves_all = method.variant == "disjoint" or method.window_within or not blocks
        end = before.window.front + 1 if leaves_all else min(blocks)
    known = _by_rules(books, client, before, after, method)
    front = known.front if known else max(after.window.front, 1 if was_last else before.window.front + 1)
    resets = before.entry.resets + (was_last and not held)
    if (end, front, resets) != (after.window.end, after.window.front, after.entry.resets):
        _report(books, client, after, Window(end, front), findings)


def _by_rules(books: Books, client: str, before: _Round | None, after: _Round, method: FedEL) -> Window | None:
    """A window with the front that the rules give; ``None`` where the client's timing profile is not known.

    The profile of the last join is the one it used in that round if it predicts the same seconds.
    """
    spec, profile = books.spec, books.profiles.get(client)
    assert spec is not None
    task, entry = after.task, after.entry
    # What a device found out about its own memory nobody else knows.
    if profile is None or task is None or task.memory_bytes:
        return None
    if task.speed.slowness != 1:
        profile = profile.scaled(task.speed.slowness)
    prices = Prices.on(task, spec, profile, entry.num_samples, method.budget_scope)
    cost, steps = prices.step(entry.selected, after.window), entry.num_steps - 1 + entry.last_share
    predicted = (cost.forward_seconds * steps, cost.backward_seconds * steps)
    if predicted != (entry.predicted_forward_seconds, entry.predicted_backward_seconds):
        return None
    return method.next_window(before.window if before is not None else None, (), prices, task.seed)


def _report(books: Books, client: str, each: _Round, expected: Window, findings: Findings) -> None:
    has = f"{each.window.end}-{each.window.front}, {each.entry.resets} resets"
    should = f"the rules give {expected.end}-{expected.front} after the round it counted in before"
    findings.add(ILLEGAL, books.at(each.round_num), f"client '{client}' has the window {has}: {should}")
