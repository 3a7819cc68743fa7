"""A run of any number of rounds, written into a coordinator's database as if it had been trained."""

from __future__ import annotations

import json
import time
from pathlib import Path

from fedel_coordinator.persistence import spec_to_json
from fedel_coordinator.sql import SqlStore
from fedel_coordinator.store import ClientRow, RoundRow, RunRow

from fedel.bench.made_up import made_up_profile, made_up_spec
from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.roles.recorder import client_record
from fedel.roles.run_state import CLOSED, PAUSED, TaskResult
from fedel.serialisation import to_json
from fedel.types import LocalWork, ModelSpec, Report, StepCost, Task, Window

SECONDS = {"download": 0.4, "train": 2.0, "upload": 0.3, "wait": 0.1}


def store_run(database: Path, run: str, num_rounds: int, num_clients: int = 10) -> None:
    """The run is paused, so that it does not change while it is looked at."""
    store, spec = SqlStore(f"sqlite:///{database}"), made_up_spec(40, 1_000_000)
    job = RunConfig.parse({"rounds": {"num_rounds": 2 * num_rounds}})
    state = json.dumps({"round_num": num_rounds})
    row = RunRow(run, json.dumps(job.table()), spec_to_json(spec), 1, PAUSED, time.time(), state_json=state)
    profile = to_json(made_up_profile(spec))
    clients = [f"device-{number:04}" for number in range(num_clients)]
    with store.together():
        store.create_run(row)
        for client in clients:
            store.put_client(ClientRow(run, client, "light", 8 << 30, "1", 500, False, profile))
        for number in range(num_rounds):
            record = _record(number, clients, spec).to_json()
            store.put_round(RoundRow(run, number, CLOSED, '{"tasks":[]}', 1.7e9 + 5 * number, record))
    store.close()


def _record(number: int, clients: list[str], spec: ModelSpec) -> RoundRecord:
    window = Window(1, 2)
    selected = tuple(tensor.name for tensor in spec.weights_in(window.end, window.front))
    entries = []
    for client in clients:
        report = Report(client, number, 500, 20, 20.0, 1.0, cost=StepCost(0.03, 0.07), train_seconds=2.0)
        task = Task(number, client, 0.1, LocalWork(num_steps=20), seed=number)
        result = TaskResult(report, 100_000, 500_000, SECONDS)
        entries.append(client_record("train", report, task, result, "light"))
    return RoundRecord(
        round=number,
        strategy="fedel",
        budget_seconds=0.1,
        num_tasks=len(clients),
        num_updates=len(clients),
        loss=1.0,
        o1=0.4,
        clients=tuple(entries),
        version=number + 1,
        opened_at=1.7e9 + 5 * number,
        latency_seconds=4.0,
        phases=SECONDS,
        tensor_clients=dict.fromkeys(selected, len(clients)),
        accuracy=0.5,
        test_loss=1.0,
    )
