"""Testing the model on a client that holds test data, and keeping the best."""

from __future__ import annotations

from pathlib import Path

from fedel.v1 import coordinator_pb2 as pb
from tests.services.coordinator.support import Federation, asynchronous, run_config
from tests.strategies.fakes import same_bits


@asynchronous
async def test_the_fastest_evaluator_tests_and_the_best_model_is_kept(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=5))
        accuracies = {1: 0.2, 2: 0.7, 3: 0.4, 4: 0.6, 5: 0.7}
        federation.agent("client-0")
        fast = federation.agent("client-1", accuracies=accuracies)
        slow = federation.agent("client-2", accuracies=accuracies)
        await fast.until("closed", round_num=1)
        early = await federation.model(version=2)
        records = await federation.finished()
        assert [0.2, 0.7, 0.4, 0.6, 0.7] == [record.accuracy for record in records]
        assert [1 - 0.2, 1 - 0.7] == [record.test_loss for record in records[:2]]
        assert 0.25 == records[0].evaluate_seconds == records[0].phases["evaluate"]
        assert [1, 2, 3, 4, 5] == [task.model_version for task in fast.kinds("evaluate")]
        assert [] == slow.kinds("evaluate")
        row = federation.coordinator.store.run("night-1")
        assert (2, 0.7) == (row.best_version, row.best_accuracy)
        assert same_bits(early, await federation.model(version=2))


@asynchronous
async def test_every_second_model_and_the_last_are_evaluated(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=5, evaluate_every=2, min_clients=1))
        federation.agent("client-0", accuracies=dict.fromkeys(range(6), 0.5))
        records = await federation.finished()
        assert [None, 0.5, None, 0.5, 0.5] == [record.accuracy for record in records]
        assert "evaluate" not in records[0].phases


@asynchronous
async def test_without_an_evaluator_no_round_waits(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=2, min_clients=1))
        federation.agent("client-0")
        assert [None, None] == [record.accuracy for record in await federation.finished()]


@asynchronous
async def test_an_evaluator_that_fails_is_replaced_and_trains_on(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=2, min_clients=2))
        broken = federation.agent("client-0", accuracies={})
        federation.agent("client-1", accuracies={1: 0.5, 2: 0.6})
        records = await federation.finished()
        assert [0.5, 0.6] == [record.accuracy for record in records]
        assert [2, 2] == [record.num_updates for record in records]
        assert [1, 2] == [task.model_version for task in broken.kinds("evaluate")]


@asynchronous
async def test_an_evaluator_that_is_lost_is_replaced(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=2))
        lost = federation.agent("client-0", accuracies={1: 0.9})
        lost.mute_evaluations = True
        federation.agent("client-1", accuracies={1: 0.5})
        await lost.until("evaluate")
        await lost.drop()
        assert [0.5] == [record.accuracy for record in await federation.finished()]


@asynchronous
async def test_the_only_evaluator_gets_the_test_again_after_a_reconnect(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1))
        agent = federation.agent("client-0", accuracies={1: 0.9})
        agent.mute_evaluations = True
        await agent.until("evaluate")
        await agent.drop()
        agent.mute_evaluations = False
        agent.start()
        assert [0.9] == [record.accuracy for record in await federation.finished()]


@asynchronous
async def test_an_evaluation_that_takes_too_long_is_skipped(tmp_path: Path) -> None:
    async with Federation(tmp_path) as federation:
        rounds = {"deadline_floor_seconds": 0.3, "deadline_factor": 1e-6}
        await federation.create(run_config(num_rounds=1, min_clients=1, **rounds))
        agent = federation.agent("client-0", accuracies={1: 0.9})
        agent.mute_evaluations = True
        assert [None] == [record.accuracy for record in await federation.finished()]
        await agent.send(evaluation=pb.EvaluationDone(run="night-1", model_version=1, accuracy=0.9))


@asynchronous
async def test_rounds_go_on_beside_a_test_and_close_in_order(tmp_path: Path) -> None:
    """Two rounds make a model while a test is under way, which the coordinator's end does not lose."""
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=3, min_clients=1))
        agent = federation.agent("client-0", accuracies={1: 0.9, 2: 0.5, 3: 0.6})
        agent.mute_evaluations = True
        await agent.until("closed", round_num=1)
        assert [1] == [task.model_version for task in agent.kinds("evaluate")]
        assert [] == federation.coordinator.store.records("night-1")
        best = await federation.model(version=1)
        agent.mute_evaluations = False
        await federation.restart_coordinator()
        records = await federation.finished()
        assert [(0, 0.9), (1, 0.5), (2, 0.6)] == [(record.round, record.accuracy) for record in records]
        assert same_bits(best, await federation.model(version=1))
        assert [2, 3] == [task.model_version for task in agent.kinds("evaluate")][-2:]


@asynchronous
async def test_a_run_of_an_earlier_version_goes_on_with_its_test(tmp_path: Path) -> None:
    """There, a round that had made its model was the last one until its test ended."""
    async with Federation(tmp_path) as federation:
        await federation.create(run_config(num_rounds=1, min_clients=1))
        agent = federation.agent("client-0", accuracies={1: 0.9})
        agent.mute_evaluations = True
        await agent.until("evaluate")
        row = federation.coordinator.store.last_round("night-1")
        assert ("committed", 0) == (row.status, row.round_num)
        agent.mute_evaluations = False
        await federation.restart_coordinator()
        assert [0.9] == [record.accuracy for record in await federation.finished()]
