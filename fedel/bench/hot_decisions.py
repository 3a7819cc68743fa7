"""What the coordinator decides in a round, and what a method decides on a device, each with its floor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from fedel_coordinator.sessions import Device, Session

from fedel.bench.cpu import Case
from fedel.bench.trainer import NUM_SPEEDS, timing
from fedel.bench.workloads import Workload
from fedel.core import selection
from fedel.job import RunConfig
from fedel.records import ClientRecord, RoundRecord
from fedel.roles.planner import Handover, RoundPlanner
from fedel.types import ClientView, Task
from fedel.v1 import coordinator_pb2, task_pb2

NUM_CLIENTS = 200


def cases(of: Workload) -> Iterator[Case]:
    """All of them are for ``NUM_CLIENTS`` clients, except the selection, which is for one."""
    yield _plan(of)
    yield _fan_out(of)
    yield _records(of)
    yield _select(of)


def _plan(of: Workload) -> Case:
    planner = RoundPlanner(RunConfig.parse({"strategy": {"name": "fedel"}}), of.spec)
    speeds = [timing(of, 1 + i) for i in range(NUM_SPEEDS)]
    clients = [ClientView(f"client-{i}", 100 + i, speeds[i % NUM_SPEEDS]) for i in range(NUM_CLIENTS)]
    first = planner.plan(Handover(), clients).tasks[0]
    fields = {name: getattr(first, name) for name in first.__dataclass_fields__}
    return Case(
        "plan a round",
        f"{NUM_CLIENTS} clients",
        lambda: planner.plan(Handover(), clients),
        "make as many tasks",
        lambda: [Task(**fields) for _ in range(NUM_CLIENTS)],
    )


def _fan_out(of: Workload) -> Case:
    importance = {t.name: 1.0 for t in of.spec.weights}
    task = task_pb2.Task(run="bench", global_importance=importance.values())
    message = coordinator_pb2.SessionResponse(task=task)
    sessions = [Session(f"client-{i}", Device()) for i in range(NUM_CLIENTS)]

    async def send() -> None:
        for session in sessions:
            session.push(message)
            async for waiting in session.messages():
                waiting.SerializeToString()
                break

    return Case(
        "send tasks to sessions",
        f"{NUM_CLIENTS} clients",
        lambda: asyncio.run(send()),
        "encode as many messages",
        lambda: [message.SerializeToString() for _ in range(NUM_CLIENTS)],
    )


def _records(of: Workload) -> Case:
    selected = tuple(t.name for t in of.spec.weights)
    one: dict[str, Any] = {
        "window": (1, 4),
        "resets": 0,
        "num_selected": len(selected),
        "selected": selected,
        "num_steps": 50,
        "num_samples": 100,
        "loss": 0.5,
        "budget_seconds": 1.0,
        "predicted_seconds": 1.0,
        "predicted_forward_seconds": 0.4,
        "predicted_backward_seconds": 0.6,
        "train_seconds": 1.0,
        "deviation": 0.0,
        "predicted_deviation": 0.0,
        "over_budget": False,
        "peak_memory_bytes": 10**8,
    }
    clients = tuple(ClientRecord(client=f"client-{i}", **one) for i in range(NUM_CLIENTS))
    record = RoundRecord(0, "fedel", 1.0, NUM_CLIENTS, NUM_CLIENTS, 0.5, 0.1, clients)
    plain = json.loads(record.to_json())
    return Case(
        "write and read a record",
        f"{NUM_CLIENTS} clients",
        lambda: RoundRecord.from_json(record.to_json()),
        "json.dumps and loads",
        lambda: json.loads(json.dumps(plain)),
    )


def _select(of: Workload) -> Case:
    times = timing(of, 1).tensors
    grads, updates = [t.grad_seconds for t in times], [t.update_seconds for t in times]
    importance = [1.0 + place % 7 for place in range(len(times))]
    budget = 0.4 * (sum(grads) + sum(updates))
    return Case(
        "select tensors",
        f"one client, {len(times)} tensors",
        lambda: selection.select(grads, updates, importance, budget),
        "sort them by importance",
        lambda: sorted(zip(importance, grads, updates, strict=True)),
    )
