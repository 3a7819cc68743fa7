"""What travels: up, the tensors that were trained; down, those that changed since the client's last model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.types import Tensors
from tests.federation.support import agents, create_run, job_of, servers, simulated, watching
from tests.simulation.history import History

NUM_CLIENTS, NUM_ROUNDS = 4, 5


def records_of(job: RunConfig, folder: Path) -> list[RoundRecord]:
    async def scenario() -> list[RoundRecord]:
        async with servers(folder) as made:
            await create_run(made.address, "bytes", job)
            async with (
                agents(folder, made.address, range(NUM_CLIENTS), NUM_CLIENTS),
                watching(made.address, "bytes") as watch,
            ):
                await watch.finished()
                return watch.records

    return asyncio.run(scenario())


def size_of(model: Tensors) -> int:
    return sum(values.nbytes for values in model.values())


def expected_up(run: History) -> list[dict[str, int]]:
    """Bytes of each client's patches, by round."""
    return [
        {client: size_of({n: p.values for n, p in u.patches.items()}) for client, u in updates.items()}
        for updates in run.counted
    ]


def expected_down(run: History) -> list[int]:
    """All of the model at first; then what the round before changed, the same for every client."""
    changed = [
        {name: values for name, values in after.items() if values.tobytes() != before[name].tobytes()}
        for before, after in zip(run.models, [*run.models[1:], run.model], strict=True)
    ]
    return [size_of(tensors) for tensors in (run.models[0], *changed[:-1])]


def measured(records: list[RoundRecord], key: str) -> list[dict[str, int]]:
    return [{entry.client: getattr(entry, key) for entry in record.clients} for record in records]


@pytest.mark.parametrize("share", [1.0, 0.25], ids="T_th {} of the fastest".format)
def test_fedel_sends_what_it_trained_and_fetches_what_changed(tmp_path: Path, share: float) -> None:
    budget = {"policy": "share", "value": share}
    job = job_of({"name": "fedel"}, NUM_CLIENTS, NUM_ROUNDS, budget=budget)
    run, records = simulated(job, NUM_CLIENTS), records_of(job, tmp_path)
    assert expected_up(run) == measured(records, "bytes_up")
    down = [dict.fromkeys(updates, size) for updates, size in zip(run.counted, expected_down(run), strict=True)]
    assert down == measured(records, "bytes_down")
    model = size_of(run.model)
    mean_up = sum(record.bytes_up for record in records) / NUM_ROUNDS / NUM_CLIENTS
    assert mean_up < 0.75 * model
    if share < 1:
        assert mean_up < 0.4 * model
        assert max(expected_down(run)[1:]) < 0.9 * model


def test_fedavg_sends_every_weight(tmp_path: Path) -> None:
    job = job_of({"name": "fedavg"}, NUM_CLIENTS, 2)
    run = simulated(job, NUM_CLIENTS)
    assert expected_up(run) == measured(records_of(job, tmp_path), "bytes_up")
    assert {1} == {len(set(sizes.values())) for sizes in expected_up(run)}
