"""A control, not a method of the paper: FedAvg on the fast devices only, so that no round waits for a slow one.

The data of the slow devices never counts. A method that lets slow devices take part should do better than this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedel.core.timing import fits
from fedel.strategies.base import check_scope, draw, task_for, whole_step
from fedel.strategies.fedavg import FedAvg
from fedel.types import Plan, RoundContext


@dataclass(frozen=True)
class FedAvgFast(FedAvg):
    name: ClassVar[str] = "fedavg-fast"

    budget_scope: str = "backward"
    """What counts against T_th: ``backward``, as in the paper's simulation, or ``train``, the whole step."""
    tolerance: float = 0.1
    """How much longer than T_th a step of a fast device may take, as a share of T_th."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_scope(self.budget_scope)
        if self.tolerance < 0:
            raise ValueError(f"tolerance = {self.tolerance:g}: a share of T_th does not go below 0")

    def plan(self, context: RoundContext) -> Plan:
        """Where nobody keeps T_th, the fastest are those that it goes by."""
        seconds = [whole_step(context.spec, c.profile).total(self.budget_scope) for c in context.clients]
        limit = max(context.budget_seconds, min(seconds, default=0.0)) * (1 + self.tolerance)
        fast = [c for c, each in zip(context.clients, seconds, strict=True) if fits(each, limit)]
        return Plan(tuple(task_for(context, client) for client in draw(replace(context, clients=fast))))
