"""Memory that runs out on a device: the round goes on with less, and the device remembers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from fedel_edge.config import AgentConfig
from fedel_edge.memory_limit import SHARE, LimitLowered, MemoryLimit, fit_in_memory, lower, ran_out

from fedel.core.memory_budget import least_bytes, whole_bytes
from fedel.errors import ServiceError
from fedel.strategies import FedAvg, FedEL
from fedel.strategies.fedprox import FedProx
from fedel.testing import fleet, memory_use
from fedel.types import LocalWork, MemoryUse, Task
from fedel.wire.codec import report_from_pb
from tests.agents import trainers
from tests.agents.stand_ins import Federation, run_scenario, run_table, running, task_of

CLIENT = fleet()["client-0"]
USE = memory_use(CLIENT.spec)
WHOLE = whole_bytes(CLIENT.spec, USE)
TASK = Task(0, "client-0", 1.0, LocalWork(), 1)
OUT = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


def fit_until_done(fit, strategy, limit):  # type: ignore[no-untyped-def]
    """As an agent does."""
    while True:
        with suppress(LimitLowered):
            return fit_in_memory(fit, TASK, strategy, with_memory(), limit)


def with_memory(use: MemoryUse | None = USE):  # type: ignore[no-untyped-def]
    return replace(CLIENT, profile=replace(CLIENT.profile, memory=use))


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (OUT, True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_which_errors_mean_memory(error: Exception, is_memory: bool) -> None:
    assert is_memory == ran_out(error)


def test_lowered_until_it_fits_and_remembered(tmp_path: Path) -> None:
    asked = []

    def fit(task: Task) -> str:
        asked.append(task.memory_bytes)
        if len(asked) < 3:
            raise OUT
        return "trained"

    limit = MemoryLimit(tmp_path / "limit")
    assert "trained" == fit_until_done(fit, FedEL(), limit)
    assert asked == [0, int(WHOLE * SHARE), int(int(WHOLE * SHARE) * SHARE)]
    assert MemoryLimit(tmp_path / "limit").found() == asked[-1]
    asked.append(0)
    fit_in_memory(fit, TASK, FedEL(), with_memory(), limit)
    assert asked[-1] == asked[2], "the next round begins where this one ended"


def test_the_least_limit_counts(tmp_path: Path) -> None:
    limit, fit = MemoryLimit(tmp_path / "limit"), lambda task: task.memory_bytes
    trainer = with_memory(replace(USE, limit_bytes=5000))
    assert 5000 == fit_in_memory(fit, TASK, FedEL(), trainer, limit)
    assert 4000 == fit_in_memory(fit, replace(TASK, memory_bytes=4000), FedEL(), trainer, limit)
    limit.keep(3000)
    assert 3000 == fit_in_memory(fit, replace(TASK, memory_bytes=4000), FedEL(), trainer, limit)


@pytest.mark.parametrize("strategy", [FedAvg(), FedProx()])
def test_a_method_that_has_nothing_smaller_fails(tmp_path: Path, strategy: FedAvg) -> None:
    def fit(_: Task) -> None:
        raise OUT

    with pytest.raises(ServiceError, match=r"memory ran out .* use FedEL"):
        fit_in_memory(fit, TASK, strategy, with_memory(), MemoryLimit(tmp_path / "limit"))


def test_ends_where_nothing_smaller_is_left(tmp_path: Path) -> None:
    limit = MemoryLimit(tmp_path / "limit")

    def fit(_: Task) -> None:
        raise MemoryError

    with pytest.raises(ServiceError, match="memory ran out"):
        fit_until_done(fit, FedProx(base=FedEL()), limit)
    assert limit.found() >= least_bytes(CLIENT.spec, USE)
    assert 0 == lower(0, with_memory(None)), "not measured"


def test_other_errors_pass(tmp_path: Path) -> None:
    def fit(_: Task) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        fit_in_memory(fit, TASK, FedEL(), with_memory(), MemoryLimit(tmp_path / "limit"))


def test_a_damaged_file_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "limit").write_bytes(b"x" * 100)
    assert 0 == MemoryLimit(tmp_path / "limit").found()


def test_the_round_goes_on_in_an_agent(tmp_path: Path) -> None:
    """Over gRPC: the trainer runs out of memory above a limit that nobody told it."""

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            join = await fed.joined(run_table("small_memory"))
            assert join.profile.memory.base_bytes == USE.base_bytes
            trainers.memory_there = int(WHOLE * 0.7)
            fed.order(0, budget_seconds=100.0)
            first = await fed.done(0)
            tried = len(trainers.memory_asked)
            fed.order(1, accepted_round=0, budget_seconds=100.0)
            second = await fed.done(1)
        assert not fed.coordinator.all("failed")
        *failed, done, next_round = trainers.memory_asked
        assert tried == len(failed) + 1 > 1, "the second round had one attempt"
        assert min(failed) > trainers.memory_there >= max(done, next_round)
        windows = [report_from_pb(each.report).window for each in (first, second)]
        last = CLIENT.spec.num_blocks
        assert windows[0] is not None
        assert windows[1] is not None
        assert windows[0].front < windows[1].front <= last, "the window slides on, with less memory"

    run_scenario(tmp_path, scenario)


def test_config() -> None:
    assert 512 * 10**6 == AgentConfig(memory_mb=512).trainer_settings.memory_bytes
    with pytest.raises(ValueError, match="memory_mb"):
        AgentConfig(memory_mb=-1)
    assert task_of(0).memory_bytes == 0
