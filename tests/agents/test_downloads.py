"""What an agent downloads: what its task needs and has changed, from each aggregator its part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedel.roles.edge import KeptMemories
from fedel.strategies import FedEL
from fedel.types import Memory, Tensors
from fedel.v1 import coordinator_pb2
from fedel.wire.codec import task_from_pb
from tests.agents import trainers
from tests.agents.expected import CLIENT, expected_update, needed_for, same_patches, size_of
from tests.agents.stand_ins import (
    RUN,
    SPEC,
    Aggregator,
    Federation,
    held_of,
    run_scenario,
    running,
    task_of,
)
from tests.strategies.fakes import initial_model


def changed(model: Tensors, name: str) -> Tensors:
    return {**model, name: model[name] + np.float32(1)}


def test_only_what_the_window_needs_and_changed_is_downloaded(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        name = SPEC.tensors[0].name
        fed.aggregator.versions[1] = changed(fed.aggregator.versions[0], name)
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            first = await fed.done(0)
            fed.order(1, accepted_round=0, model_version=1)
            second = await fed.done(1)
        assert [0, 1] == [request.version for request in fed.aggregator.requests]
        before, after = (needed_for(done) for done in (first, second))
        assert after - before, "the window moved on"
        had, asked = (held_of(request) for request in fed.aggregator.requests)
        assert dict.fromkeys(before, -1) == had
        assert {n: 0 if n in before else -1 for n in after} == asked
        assert size_of({name} | (after - before)) == second.bytes_down

    run_scenario(tmp_path, scenario)


def test_an_older_version_is_downloaded_again(tmp_path: Path) -> None:
    """What the copy on disk has of a later version is of no use for an earlier one."""

    async def scenario(fed: Federation) -> None:
        later, name = SPEC.tensors[0].name, SPEC.tensors[1].name
        fed.aggregator.versions[1] = changed(fed.aggregator.versions[0], later)
        fed.aggregator.versions[2] = changed(fed.aggregator.versions[1], name)
        async with running(fed.agent()):
            await fed.joined()
            for round_num, version in enumerate((0, 2, 1)):
                fed.order(round_num, model_version=version)
                done = await fed.done(round_num)
        needed = needed_for(done)
        first, second, third = (held_of(request) for request in fed.aggregator.requests)
        assert (dict.fromkeys(needed, -1), dict.fromkeys(needed, 0)) == (first, second)
        assert {n: -1 if SPEC.by_name[n].block == 1 else 0 for n in needed} == third, "block 1 changed"
        task = task_from_pb(task_of(2, model_version=1), SPEC)
        expected = FedEL().fit(task, fed.aggregator.versions[1], Memory(), CLIENT)[0]
        assert same_patches(expected, fed.aggregator.updates()[-1])

    run_scenario(tmp_path, scenario)


def test_a_tensor_that_an_aggregator_keeps_back_is_named(tmp_path: Path) -> None:
    """Also where the copy on disk has it of a later version."""

    async def scenario(fed: Federation) -> None:
        fed.aggregator.versions[1] = changed(fed.aggregator.versions[0], SPEC.tensors[0].name)
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0, model_version=1)
            await fed.done(0)
            kept_back = Aggregator(frozenset(SPEC.by_name) - {SPEC.tensors[0].name})
            fed.aggregator.mine = kept_back.mine  # type: ignore[method-assign]
            fed.order(1, model_version=0)
            failed = await fed.coordinator.until("failed")
        assert f"did not send tensor '{SPEC.tensors[0].name}'" in failed.message

    run_scenario(tmp_path, scenario)


def test_evaluation_gets_everything(tmp_path: Path) -> None:
    async def scenario(fed: Federation) -> None:
        async with running(fed.agent(evaluate=True)):
            await fed.joined()
            fed.order(0)
            before = needed_for(await fed.done(0))
            fed.coordinator.push(evaluate=coordinator_pb2.EvaluationTask(run=RUN, model_version=0))
            tested = await fed.coordinator.until("evaluation")
        assert tested.accuracy == pytest.approx(trainers.score(initial_model(), ()).accuracy)
        assert SPEC.by_name.keys() - before == held_of(fed.aggregator.requests[1]).keys()

    run_scenario(tmp_path, scenario)


def test_each_shard_is_sent_its_own_part_even_if_empty(tmp_path: Path) -> None:
    deep = frozenset(t.name for t in SPEC.tensors if t.block == SPEC.num_blocks)
    rest = frozenset(t.name for t in SPEC.tensors) - deep
    shards = [Aggregator(deep), Aggregator(rest)]

    async def scenario(fed: Federation) -> None:
        async with running(fed.agent()):
            await fed.joined()
            fed.order(0)
            await fed.done(0)
        expected = expected_update(0, KeptMemories())
        assert deep.isdisjoint(expected.patches)
        assert [set(), set(expected.patches)] == [set(a.updates()[0].patches) for a in shards]
        assert [0, 1] == [len(a.requests) for a in shards], "nothing of the first is needed"

    run_scenario(tmp_path, scenario, aggregators=shards)
