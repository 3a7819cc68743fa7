"""A federation over gRPC gives the model that the simulation gives, bit for bit, for every method.

Also with a late client, a lost client and an over-selected round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from fedel.job import Protection, RunConfig, Server
from fedel.strategies import METHODS
from fedel.types import UploadSettings
from fedel.v1 import coordinator_pb2 as pb
from tests.federation.support import Watch, agents, create_run, job_of, model_of, servers, simulated, watching
from tests.simulation.history import History
from tests.strategies.fakes import same_bits

NUM_CLIENTS = 6
EPOCHS = {"num_steps": 0, "num_epochs": 2, "batch_size": 7}
"""By epochs, the number of steps follows the number of samples, which no two clients share."""

JOBS: Mapping[str, RunConfig] = {
    name: job_of({"name": name}, NUM_CLIENTS, seed=seed, num_participants=4 if seed % 2 else 0)
    for seed, name in enumerate(METHODS)
} | {
    "fedprox-fedel": job_of(
        {"name": "fedprox", "mu": 0.1, "base": {"name": "fedel", "beta": 0.4}}, NUM_CLIENTS, 4, lr_decay=0.9
    ),
    "fednova-fedel": job_of({"name": "fednova", "base": {"name": "fedel"}}, NUM_CLIENTS, 4, work=EPOCHS),
    "depthfl-feddyn": job_of(
        {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": NUM_CLIENTS}, NUM_CLIENTS, num_participants=4
    ),
    "fedavg-epochs": job_of({"name": "fedavg", "weighting": "samples"}, NUM_CLIENTS, work=EPOCHS),
    "fedel-taught": job_of(
        {"name": "fedel", "start": "spread", "teach": 0.5, "window_within": True}, NUM_CLIENTS, 4, seed=7
    ),
    "fedel-clipped": replace(job_of({"name": "fedel"}, NUM_CLIENTS), protection=Protection(clip_norm=0.1)),
    "fedel-round": job_of({"name": "fedel", "budget_scope": "round"}, NUM_CLIENTS, 4, seed=6),
    "fedel-memory": job_of({"name": "fedel"}, NUM_CLIENTS, 4, seed=4, options={"memory_share": 0.5}),
    "fiarse-median": replace(job_of({"name": "fiarse"}, NUM_CLIENTS), protection=Protection(fold="median")),
}
COMPRESSED: Mapping[str, RunConfig] = {
    f"{name}-{upload.compression}-{upload.share:g}": replace(JOBS[name], upload=upload)
    for name, upload in (
        ("fedel", UploadSettings("fp16")),
        ("fedel", UploadSettings("int8")),
        ("fedel", UploadSettings("topk")),
        ("fedel", UploadSettings("topk", 0.01)),
        ("fednova-fedel", UploadSettings("int8")),
        ("depthfl-feddyn", UploadSettings("topk")),
        ("heterofl", UploadSettings("int8")),
        ("fiarse", UploadSettings("topk")),
        ("fedel-clipped", UploadSettings("fp16")),
        ("fiarse-median", UploadSettings("fp16")),
    )
}
"""Every compression; and with whole tensors, slices and bitmaps, states of methods, every kind of fold."""
SERVER: Mapping[str, RunConfig] = {
    name: replace(job_of(strategy, NUM_CLIENTS, 4, num_participants=4), server=server)
    for name, strategy, server in (
        ("fedel-damped", {"name": "fedel", "damping": 0.5}, Server(average=0.75)),
        ("fedel-momentum", {"name": "fedel", "weighting": "samples", "damping": 1}, Server(0.5, 0.3)),
        ("heterofl-damped", {"name": "heterofl", "damping": 0.5}, Server(0.75, 0.3)),
        ("fednova-damped", {"name": "fednova", "base": {"name": "fedel", "damping": 0.5}}, Server(0.75)),
        (
            "feddyn-averaged",
            {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": NUM_CLIENTS},
            Server(average=0.75),
        ),
        ("pyramidfl-averaged", {"name": "pyramidfl"}, Server(average=0.75)),
    )
}
"""What few clients trained is damped, and the server has steps of its own; compared is what is published."""
RUNS = {**JOBS, **COMPRESSED, **SERVER}
SHARDED = (
    *("fedel", "fednova-fedel", "depthfl-feddyn", "heterofl", "fiarse", "fiarse-median"),
    *("fedel-memory", "fedel-round"),
)
"""One of each kind: whole tensors, folds with a state or a norm of their own, slices, bitmaps, robust means."""
SHARDED_COMPRESSED = tuple(name for name in COMPRESSED if "clipped" not in name)
"""Where several keep the model, each clips its own part: a simulation has one."""
TOGETHER = tuple(name for name in JOBS if name not in ("fedel-memory", "fedel-round"))
MAX_RUNS = 16
"""An agent takes part in no more runs at once."""


@lru_cache(maxsize=len(RUNS))
def expected(name: str) -> History:
    return simulated(RUNS[name], NUM_CLIENTS)


async def difference(watch: Watch, address: str, folder: Path) -> str:
    """How a run differs from its simulation; empty if it does not."""
    status = await watch.ended()
    if status.phase != pb.RUN_PHASE_FINISHED:
        return f"it ended in phase {status.phase}: {status.message}"
    run = expected(watch.run)
    if [sorted(updates) for updates in run.counted] != watch.counted:
        return f"these clients counted: {watch.counted}"
    model = await model_of(address, watch.run, folder)
    return "" if same_bits(run.published, model) else "it has another model"


async def differences(folder: Path, names: tuple[str, ...], num_aggregators: int) -> dict[str, str]:
    """Of runs that share one federation, all at once."""
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(servers(folder, num_aggregators))
        watches = []
        for name in names:
            await create_run(made.address, name, RUNS[name])
            watches.append(await stack.enter_async_context(watching(made.address, name)))
        await stack.enter_async_context(agents(folder, made.address, range(NUM_CLIENTS), NUM_CLIENTS))
        found = {watch.run: await difference(watch, made.address, folder) for watch in watches}
    return {name: what for name, what in found.items() if what}


@pytest.mark.parametrize(
    ("num_aggregators", "names"),
    [
        pytest.param(1, TOGETHER[:MAX_RUNS], id="1 aggregator"),
        pytest.param(1, TOGETHER[MAX_RUNS:], id="1 aggregator, the rest"),
        pytest.param(2, SHARDED, id="2 aggregators"),
        pytest.param(1, tuple(COMPRESSED), id="compressed, 1 aggregator"),
        pytest.param(2, SHARDED_COMPRESSED, id="compressed, 2 aggregators"),
        pytest.param(1, tuple(SERVER), id="server steps, 1 aggregator"),
        pytest.param(2, tuple(SERVER), id="server steps, 2 aggregators"),
    ],
)
def test_grpc_gives_the_bits_of_the_simulation(
    tmp_path: Path, num_aggregators: int, names: tuple[str, ...]
) -> None:
    assert {} == asyncio.run(differences(tmp_path, names, num_aggregators))


def test_memory_makes_a_difference() -> None:
    windows = [
        update.report.window for round_ in expected("fedel-memory").counted for update in round_.values()
    ]
    free = [update.report.window for round_ in expected("fedel").counted for update in round_.values()]
    assert max(w.front - w.end for w in windows if w) < max(w.front - w.end for w in free if w)


def test_some_last_steps_are_short() -> None:
    reports = [update.report for round_ in expected("fedel-round").counted for update in round_.values()]
    assert any(report.last_share < 1 for report in reports)


def test_the_compared_runs_are_uneven_and_all_different() -> None:
    models = {b"".join(values.tobytes() for values in expected(name).published.values()) for name in RUNS}
    assert len(RUNS) == len(models)
    reports = [update.report for update in expected("fednova-fedel").counted[0].values()]
    for field in ("num_steps", "num_samples", "effective_steps", "loss"):
        assert NUM_CLIENTS == len({getattr(report, field) for report in reports}), field
