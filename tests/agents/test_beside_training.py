"""Models are tested while the device trains, in a thread of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fedel.v1 import coordinator_pb2 as pb
from tests.agents import trainers
from tests.agents.stand_ins import RUN, Federation, run_scenario, run_table, running


@pytest.fixture(autouse=True)
def _clear() -> Any:
    trainers.threads.clear()
    for event in (trainers.entered, trainers.release, trainers.entered_test, trainers.release_test):
        event.clear()
    yield
    trainers.release.set()
    trainers.release_test.set()


def push_test(fed: Federation, version: int) -> None:
    fed.aggregator.versions.setdefault(version, fed.aggregator.versions[0])
    fed.coordinator.push(evaluate=pb.EvaluationTask(run=RUN, model_version=version))


async def first_test(fed: Federation) -> None:
    """Version 0 is tested, so that the evaluator is there."""
    trainers.release_test.set()
    push_test(fed, 0)
    await fed.coordinator.until("evaluation")
    trainers.release_test.clear()
    trainers.entered_test.clear()


def test_a_test_does_not_wait_for_training(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("beside"))
            await first_test(fed)
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            trainers.release_test.set()
            push_test(fed, 1)
            await fed.coordinator.until("evaluation", 2)
            assert [] == fed.coordinator.all("done")
            trainers.release.set()
            await fed.done(0)
        assert ["worker", "tester", "tester"] == trainers.threads

    run_scenario(tmp_path, scenario)


def test_training_does_not_wait_for_a_test(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        trainers.release.set()
        async with running(fed.agent()):
            await fed.joined(run_table("beside"))
            push_test(fed, 0)
            await asyncio.to_thread(trainers.entered_test.wait, 10)
            fed.order(0)
            await fed.done(0)
            assert [] == fed.coordinator.all("evaluation")
            trainers.release_test.set()
            await fed.coordinator.until("evaluation")

    run_scenario(tmp_path, scenario)


def assert_fetched_once(fed: Federation) -> None:
    """No tensor of a version was asked for twice."""
    asked = [
        (request.version, tensor)
        for request in fed.aggregator.requests
        for tensor, held in zip(request.tensors, request.have_versions, strict=True)
        if held < request.version
    ]
    assert asked
    assert len(asked) == len(set(asked))


def test_one_version_is_fetched_once(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        trainers.release.set()
        trainers.release_test.set()
        async with running(fed.agent()):
            await fed.joined(run_table("beside"))
            fed.order(0)
            push_test(fed, 0)
            await fed.done(0)
            await fed.coordinator.until("evaluation")
        assert_fetched_once(fed)

    run_scenario(tmp_path, scenario)


def test_a_task_downloads_before_a_test_that_came_after_it(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        trainers.release.set()
        async with running(fed.agent()):
            await fed.joined(run_table("beside"))
            await first_test(fed)
            trainers.release_test.set()
            first = fed.aggregator.versions[0]
            fed.aggregator.versions[1] = {name: values + 1 for name, values in first.items()}
            fed.order(1, model_version=1)
            push_test(fed, 1)
            assert (await fed.done(1)).bytes_down > 0
            await fed.coordinator.until("evaluation", 2)
        assert_fetched_once(fed)

    run_scenario(tmp_path, scenario)


def test_without_the_memory_a_test_waits_its_turn(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(evaluate_beside_training=False)):
            await fed.joined(run_table("beside"))
            fed.order(0)
            await asyncio.to_thread(trainers.entered.wait, 10)
            push_test(fed, 0)
            trainers.release.set()
            await fed.done(0)
            await fed.coordinator.until("evaluation")
        assert ["worker"] == trainers.threads

    run_scenario(tmp_path, scenario)


def test_a_folder_is_removed_after_the_last_test(tmp_path: Path) -> None:
    """A test that was given up may still write into it."""

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined(run_table("beside"))
            push_test(fed, 0)
            await asyncio.to_thread(trainers.entered_test.wait, 10)
            fed.coordinator.push(ended=pb.RunEnded(run=RUN))
            push_test(fed, 1)
            await fed.coordinator.until("failed")  # it has forgotten the run
            assert list(tmp_path.glob("*/model-*"))
            fed.offer(run_table("beside"), instance="2")
            trainers.release_test.set()
            await fed.coordinator.until("join", 2)
        assert [] == list(tmp_path.glob("*/model-*"))

    run_scenario(tmp_path, scenario)


def test_stop_does_not_wait_for_a_test(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        agent = fed.agent()
        async with running(agent) as ended:
            await fed.joined(run_table("beside"))
            push_test(fed, 0)
            await asyncio.to_thread(trainers.entered_test.wait, 10)
            agent.stop()
            await ended
            assert (False, True) == (agent.worker.busy, agent.busy)

    run_scenario(tmp_path, scenario)
