"""The soak says whether servers are level, and loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedel.chaos.soak import Sample, Soak, describe, run_soak


def samples(megabytes_per_hour: float, descriptors_per_hour: float, pid: int = 1) -> list[Sample]:
    return [
        Sample(
            5.0 * index,
            "coordinator",
            pid,
            100 + megabytes_per_hour * index / 720 + index % 3,
            int(30 + descriptors_per_hour * index / 720 + index % 2),
        )
        for index in range(720)
    ]


@pytest.mark.parametrize(
    ("megabytes", "descriptors", "level"), [(0, 0, True), (3, 3, True), (40, 0, False), (0, 40, False)]
)
def test_growth_is_noticed(megabytes: float, descriptors: float, level: bool) -> None:
    line, found = describe("coordinator", samples(megabytes, descriptors))
    assert level == found
    assert ("level" if level else "GROWS") in line
    assert f"{megabytes:+.1f} MB per hour" in line


def test_only_the_last_life_counts() -> None:
    assert describe("coordinator", samples(500, 500) + samples(0, 0, pid=2))[1]


def test_few_samples_say_nothing() -> None:
    line, level = describe("coordinator", samples(500, 500)[:5])
    assert level
    assert "too few samples" in line


def test_disks_have_room_for_an_hour() -> None:
    soak = Soak(seed=1, minutes=60, num_agents=50, num_aggregators=1, database="sqlite", fault_every=20)
    assert soak.layout.disk_megabytes > 0.1 * 3600


@pytest.mark.slow
def test_short_soak(tmp_path: Path) -> None:
    said: list[str] = []
    soak = Soak(seed=1, minutes=0.5, num_agents=4, num_aggregators=1, database="sqlite", fault_every=4)
    outcome = asyncio.run(run_soak(soak, tmp_path, said.append))
    assert [] == outcome.problems
    assert outcome.num_faults > 3
    assert outcome.num_acknowledged > 10
    assert (tmp_path / "samples.csv").read_text().startswith("seconds,server,pid,megabytes,num_descriptors")
