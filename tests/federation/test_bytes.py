"""What travels: up, the tensors that were trained; down, those that the window needs and the client has not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedel.job import RunConfig
from fedel.records import RoundRecord
from fedel.types import Tensors, UploadSettings
from tests.federation.support import agents, create_run, job_of, servers, simulated, watching
from tests.federation.trainers import spec_of
from tests.simulation.history import History

NUM_CLIENTS, NUM_ROUNDS = 4, 5


def records_of(job: RunConfig, folder: Path, num_aggregators: int = 1) -> list[RoundRecord]:
    async def scenario() -> list[RoundRecord]:
        async with servers(folder, num_aggregators) as made:
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


def expected_down(run: History) -> list[dict[str, int]]:
    """By round, bytes of the tensors that each client's window needs and whose values it does not have."""
    spec, copies = spec_of(), [dict[str, bytes]() for _ in range(NUM_CLIENTS)]
    expected: list[dict[str, int]] = []
    for model, updates in zip(run.models, run.counted, strict=True):
        expected.append({})
        for copy, (client, update) in zip(copies, updates.items(), strict=True):
            window = update.report.window
            assert window is not None
            needed = spec.tensors_for(spec.exits_for(window.end, window.front))
            new = {n: model[n] for n in needed if copy.get(n) != model[n].tobytes()}
            expected[-1][client] = size_of(new)
            copy |= {n: values.tobytes() for n, values in new.items()}
    return expected


def measured(records: Sequence[RoundRecord], key: str) -> list[dict[str, int]]:
    return [{entry.client: getattr(entry, key) for entry in record.clients} for record in records]


@pytest.mark.parametrize("share", [1.0, 0.25], ids="T_th {} of the fastest".format)
def test_fedel_sends_what_it_trained_and_fetches_what_it_needs(tmp_path: Path, share: float) -> None:
    budget = {"policy": "share", "value": share}
    job = job_of({"name": "fedel"}, NUM_CLIENTS, NUM_ROUNDS, budget=budget)
    run, records = simulated(job, NUM_CLIENTS), records_of(job, tmp_path)
    assert expected_up(run) == measured(records, "bytes_up")
    assert expected_down(run) == measured(records, "bytes_down")
    model = size_of(run.model)
    mean_up = sum(record.bytes_up for record in records) / NUM_ROUNDS / NUM_CLIENTS
    assert mean_up < 0.75 * model
    if share < 1:
        assert mean_up < 0.4 * model
        assert max(max(sizes.values()) for sizes in expected_down(run)) < 0.7 * model


@pytest.mark.parametrize(
    ("strategy", "num_participants"), [("fedel", 0), ("fedel", 2), ("depthfl", 0), ("elastictrainer", 2)]
)
@pytest.mark.parametrize("num_aggregators", [1, 2])
def test_the_simulation_counts_the_same_bytes(
    tmp_path: Path, strategy: str, num_participants: int, num_aggregators: int
) -> None:
    job = job_of({"name": strategy}, NUM_CLIENTS, NUM_ROUNDS, num_participants=num_participants)
    records, run = records_of(job, tmp_path, num_aggregators), simulated(job, NUM_CLIENTS)
    for key in ("bytes_down", "bytes_up"):
        assert measured(run.records, key) == measured(records, key)
        assert [getattr(r, key) for r in run.records] == [getattr(r, key) for r in records]
    assert all(sizes.values() for sizes in measured(run.records, "bytes_down"))


@pytest.mark.parametrize(
    ("upload", "most"), [("fp16", 0.51), ("int8", 0.27), ("topk", 0.2)], ids=["fp16", "int8", "topk"]
)
def test_compressed_bytes_are_counted(tmp_path: Path, upload: str, most: float) -> None:
    """In the simulation as on the wire."""
    plain = job_of({"name": "fedel"}, NUM_CLIENTS, NUM_ROUNDS, options={"scale": 4})
    job = replace(plain, upload=UploadSettings(upload))
    simulation = list(simulated(job, NUM_CLIENTS).records)
    assert measured(simulation, "bytes_up") == measured(records_of(job, tmp_path), "bytes_up")
    before = sum(record.bytes_up for record in simulated(plain, NUM_CLIENTS).records)
    # A client that selects other tensors sends other bytes; statistics are sent as they are.
    assert sum(record.bytes_up for record in simulation) < 1.1 * most * before


def test_fedavg_sends_every_weight(tmp_path: Path) -> None:
    job = job_of({"name": "fedavg"}, NUM_CLIENTS, 2)
    run = simulated(job, NUM_CLIENTS)
    assert expected_up(run) == measured(records_of(job, tmp_path), "bytes_up")
    assert {1} == {len(set(sizes.values())) for sizes in expected_up(run)}
