"""The budget scope of a run's strategy: what counts against T_th in a simulation and on devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fedel.errors import ConfigError
from fedel.job import RunConfig
from fedel.strategies import build
from fedel.types import CLOCK_PACE, PLAN_PACE

DEVICE_SCOPE = "round"
"""On devices T_th is a promise about seconds of the whole round, where a method can keep one."""


def on_devices(run: RunConfig) -> RunConfig:
    """The run with the defaults that hold on devices, where it leaves the scope and the pace open.

    A run that keeps to its plan is as a simulation has it.
    """
    pace = run.budget.pace or CLOCK_PACE
    if pace == PLAN_PACE:
        return run
    strategy = in_scope(run.strategy, DEVICE_SCOPE)
    return replace(run, strategy=strategy, budget=replace(run.budget, pace=pace))


def in_scope(table: Mapping[str, Any], scope: str) -> dict[str, Any]:
    """The strategy's table with its ``budget_scope``, or that of the one it wraps, where it does not say one.

    >>> in_scope({"name": "fedprox", "base": {"name": "fedel"}}, "round")["base"]
    {'name': 'fedel', 'budget_scope': 'round'}
    >>> in_scope({"name": "fedel", "budget_scope": "train"}, "round"), in_scope({"name": "fedavg"}, "round")
    ({'name': 'fedel', 'budget_scope': 'train'}, {'name': 'fedavg'})
    """
    strategy = build(table)
    if "base" in table:
        return {**table, "base": in_scope(table["base"], scope)}
    if "budget_scope" not in {f.name for f in fields(strategy)}:  # type: ignore[arg-type]
        return dict(table)  # it holds to no budget, or to a clock of its own choice
    try:
        build({**table, "budget_scope": scope})
    except ConfigError:
        scope = "train"  # it cannot count what is paid once in a round
    return {**table, "budget_scope": table.get("budget_scope", scope)}
