"""What is forecast is what a simulation of the same job then does, for methods that decide by the profile."""

from __future__ import annotations

import pytest

from fedel.job import RunConfig
from fedel.roles.forecast import forecast
from fedel.roles.planner import RoundPlanner
from fedel.roles.run_state import Member
from fedel.types import Speed
from tests.federation.support import job_of, simulated
from tests.federation.trainers import clients_of, spec_of

NUM_CLIENTS, NUM_ROUNDS = 4, 3


def members() -> list[Member]:
    return [
        Member(name, trainer.num_samples, trainer.profile, "fake")
        for name, trainer in clients_of(NUM_CLIENTS).items()
    ]


def of(job: RunConfig, **links: Speed):
    return forecast(RoundPlanner(job, spec_of()), members(), links, NUM_ROUNDS)


@pytest.mark.parametrize("name", ["fedavg", "fedel", "timelyfl", "depthfl", "fedavg-cut", "fedprox"])
def test_the_first_round_is_as_forecast(name: str) -> None:
    job = job_of({"name": name}, NUM_CLIENTS, NUM_ROUNDS)
    found, history = of(job), simulated(job, NUM_CLIENTS)
    first = history.counted[0]
    assert first.keys() <= {client.client for client in found.clients}
    for client in found.clients:
        if client.client not in first:
            continue
        update = first[client.client]
        report = update.report
        assert (report.window, report.num_steps) == (client.windows[0], client.num_steps)
        # Which tensors inside a window are worth it, only training can tell.
        sent = sum(patch.values.nbytes for patch in update.patches.values())
        assert client.bytes_up == pytest.approx(sent, rel=0.5 if name == "fedel" else 0.02)


def test_windows_slide_as_in_the_run() -> None:
    job = job_of({"name": "fedel", "window_within": True}, NUM_CLIENTS, NUM_ROUNDS)
    found, history = of(job), simulated(job, NUM_CLIENTS)
    for client in found.clients:
        expected = [history.counted[r][client.client].report.window for r in range(NUM_ROUNDS)]
        assert expected == list(client.windows)


def test_seconds_of_transfers_follow_the_measured_link() -> None:
    job = job_of({"name": "fedavg"}, NUM_CLIENTS)
    found = {c.client: c for c in of(job, **{"client-0": Speed(down_rate=1000.0, up_rate=500.0)}).clients}
    known, unknown = found["client-0"], found["client-1"]
    assert (known.bytes_down / 1000, known.bytes_up / 500) == (known.download_seconds, known.upload_seconds)
    assert (None, None) == (unknown.download_seconds, unknown.upload_seconds)
    assert known.seconds > known.train_seconds > 0
