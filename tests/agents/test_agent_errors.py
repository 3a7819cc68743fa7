"""What an agent reports when something goes wrong, and what it tries again."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from fedel_edge.session import worth_retrying
from grpc import aio

from fedel.v1 import coordinator_pb2
from tests.agents.stand_ins import RUN, SPEC, Federation, run_scenario, run_table, running


def test_refused_update_is_reported_once(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        fed.aggregator.refuse_with = (grpc.StatusCode.FAILED_PRECONDITION, "late")
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            failed = await fed.coordinator.until("failed")
            assert (0, "late: not like this") == (failed.round_num, failed.message)
            fed.aggregator.refuse_with = None
            fed.order(1)
            await fed.done(1)
        assert [1] == [u.report.round_num for u in fed.aggregator.updates()]

    run_scenario(tmp_path, scenario)


def test_failing_trainer_is_reported(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("failing"))
            fed.order(0)
            failed = await fed.coordinator.until("failed")
            assert "the disk with the samples is gone; put it back" == failed.message
            fed.order(1)
            assert 1 == (await fed.coordinator.until("failed", 2)).round_num

    run_scenario(tmp_path, scenario)


def test_failed_preparation_is_reported(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.coordinator.until("hello")
            fed.offer(run_table("broken"))
            failed = await fed.coordinator.until("failed")
            assert (-1, "cifar10 is not here; run `fedel data get cifar10`") == (
                failed.round_num,
                failed.message,
            )
            fed.order(0)
            assert not (await fed.coordinator.until("answer")).accepted

    run_scenario(tmp_path, scenario)


def test_refused_join_forgets_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.coordinator.push(refused=coordinator_pb2.JoinRefused(run=RUN, reason="not you"))
            fed.order(0)
            assert not (await fed.coordinator.until("answer")).accepted

    run_scenario(tmp_path, scenario)
    assert "not you" in caplog.text


def test_other_model_digest_is_reported(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.coordinator.until("hello")
            fed.offer(model_digest="0123456789abcdef")
            message = (await fed.coordinator.until("failed")).message
        assert "0123456789abcdef" in message
        assert SPEC.digest in message

    run_scenario(tmp_path, scenario)


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "gone", True),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", True),
        (grpc.StatusCode.INTERNAL, "a bug of the server", False),
        (grpc.StatusCode.FAILED_PRECONDITION, "late", False),
    ],
)
def test_which_session_errors_are_retried(code: grpc.StatusCode, details: str, expected: bool) -> None:
    error = aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details)
    assert expected == worth_retrying(error)
