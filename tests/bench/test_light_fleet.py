"""The light clients of the benchmark are clients like others; and its sections can show what they measured."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedel.bench.made_up import made_up_spec
from fedel.bench.sections import agent, coordinator, growth, simulator
from fedel.bench.slopes import slope

CPU = {"coordinator": 0.5, "aggregator": 1.0}
ACTIVE = [
    {
        "what": f"{number} clients",
        "clients": number,
        "cpu_seconds": {name: seconds * number / 10 for name, seconds in CPU.items()},
        "seconds": 1.0,
        "peak_bytes": {"coordinator": 1e8, "aggregator": 1e8},
        "database_bytes": 1000.0 * number,
        "counts": {"counted": 20 * number},
        "complaints": [],
    }
    for number in (10, 1000)
]
IDLE = {"what": "idle sessions", "sessions": 5000, "core_share": 0.3, "bytes_a_session": 50_000.0}
IDLE["heartbeats_a_second"] = 1000.0
SIZES = [
    {"what": f"model of {size}", "model_bytes": size, "clients": 2, "cpu_seconds": CPU, "seconds": 1.0}
    | {"peak_bytes": {"coordinator": 1e8, "aggregator": 1e8}}
    for size in (1e6, 1e8)
]
MARK = {
    "bytes": {"coordinator": 1e8, "aggregator": 1e8},
    "database_bytes": 1e6,
    "models_bytes": 1e6,
    "run_bytes": 1e6,
    "api_run_seconds": 0.1,
    "api_newest_rounds_seconds": 0.1,
    "status": {"cpu_seconds": 1.0},
    "runs": {"cpu_seconds": 1.0},
}


def test_light_clients_count_in_every_round_without_a_complaint(tmp_path: Path) -> None:
    row = asyncio.run(coordinator.active(3, 4, tmp_path))
    assert {"sessions": 3, "counted": 12} == row["counts"]
    assert [] == row["complaints"]
    assert row["cpu_seconds"]["coordinator"] > 0


def test_a_slope_tells_linear_from_square() -> None:
    assert 1.0 == slope([(10, 1), (100, 10), (1000, 100)])
    assert 2.0 == slope([(10, 1), (100, 100)])
    assert slope([(10, 1), (10, 2)]) is None


def test_a_made_up_model_has_the_size_that_was_asked_for() -> None:
    spec = made_up_spec(200, 10_000_000)
    assert (200, 10_000_000) == (len(spec.tensors), spec.num_bytes)


def test_the_coordinator_is_shown_with_its_slope_and_goals() -> None:
    lines = "\n".join(coordinator.show([*ACTIVE, IDLE]))
    assert "over clients: 1.00" in lines
    assert "5000 idle sessions, 1000 heartbeats a second: they take 30% of a core, and 50 kB" in lines
    assert [True, False, True] == [goal.met for goal in coordinator.goals([*ACTIVE, IDLE])]
    assert coordinator.pictures(ACTIVE)["clients"].startswith("<svg")


def test_growth_is_shown_with_what_could_not_be_measured() -> None:
    broken = {"what": "model of 1000 MB", "model_bytes": 1e9, "error": "it does not fit"}
    marks = {"what": "rounds", "marks": [MARK | {"rounds": 50}, MARK | {"rounds": 500}], "complaints": []}
    lines = "\n".join(growth.show([*SIZES, broken, marks]))
    assert "model of 1000 MB: it does not fit" in lines
    assert "| 500 |" in lines
    assert {"model-bytes", "rounds"} == growth.pictures([*SIZES, marks]).keys()
    assert [True, True] == [goal.met for goal in growth.goals([marks])]


def test_the_simulator_is_shown_beside_the_plain_loop() -> None:
    rows = [
        {"what": "plain loop", "step_seconds": 0.010},
        {"what": "fedavg", "step_seconds": 0.011, "overhead": 0.02},
        {"what": "flower", "error": "no such package"},
    ]
    assert "| FedEL, FedAvg | 91 | 1.10 | 2.0% |" in simulator.show(rows)
    assert "Flower 1.41.0 on Ray, FedAvg: no such package" in simulator.show(rows)
    assert [False] == [goal.met for goal in simulator.goals(rows)]
    assert pytest.approx(1.1) == simulator.ratios(rows)["simulation over plain loop"]


def test_what_is_installed_for_an_agent_has_no_torch_in_it() -> None:
    sizes = agent.installed()["bytes"]
    assert {"fedel", "numpy", "grpcio", "safetensors"} <= sizes.keys()
    assert not {"torch", "sqlalchemy", "aiohttp"} & sizes.keys()
