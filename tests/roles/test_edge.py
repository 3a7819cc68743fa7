"""The client's part of a round: residuals count once, whatever becomes of a round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedel.core.compression import restored
from fedel.roles.edge import RESIDUAL, KeptMemories, recall, run_task
from fedel.strategies import DepthFL, FedAvg
from fedel.types import Memory, Strategy, Tensors, UploadSettings
from fedel.wire.payload import pack
from tests.strategies.fakes import context_of, fleet, initial_model

FLEET = fleet(2)
CLIENT, TRAINER = next(iter(FLEET.items()))
TOPK = UploadSettings("topk", 0.05)


def play(
    round_num: int, accepted_round: int, memories: KeptMemories, strategy: Strategy | None = None
) -> Tensors:
    """What the aggregator gets in a round."""
    strategy = strategy or FedAvg()
    plan = strategy.plan(context_of(FLEET, round_num=round_num))
    (task,) = (task for task in plan.tasks if task.client == CLIENT)
    model = initial_model(TRAINER.spec)
    memory = recall(accepted_round, Memory(), memories)
    sent = run_task(strategy, replace(task, upload=TOPK), memory, model, TRAINER, memories)
    assert pack(sent.patches).num_bytes < 0.4 * sum(values.nbytes for values in model.values())
    return {name: patch.values - model[name] for name, patch in restored(TOPK, sent, model).patches.items()}


def residuals(memories: KeptMemories, round_num: int) -> dict[str, bytes]:
    memory = memories.load(round_num)
    assert memory is not None
    return {name: values.tobytes() for name, values in memory.tensors.items() if name.startswith(RESIDUAL)}


def test_a_lost_round_leaves_the_residuals_of_the_last_that_counted() -> None:
    lost, undisturbed = KeptMemories(), KeptMemories()
    for memories in (lost, undisturbed):
        play(0, -1, memories)
    before = residuals(lost, 0)
    play(1, 0, lost)  # never accepted: the task of round 2 names round 0
    assert before != residuals(lost, 1)
    again, straight = play(2, 0, lost), play(2, 0, undisturbed)
    assert {n: v.tobytes() for n, v in straight.items()} == {n: v.tobytes() for n, v in again.items()}
    assert residuals(undisturbed, 2) == residuals(lost, 2)


def test_the_same_task_done_again_stages_the_same_residuals() -> None:
    memories = KeptMemories()
    play(0, -1, memories)
    once = play(1, 0, memories)
    staged = residuals(memories, 1)
    twice = play(1, 0, memories)
    assert staged == residuals(memories, 1)
    assert all(np.array_equal(once[name], twice[name]) for name in once)


def test_a_method_sees_its_own_tensors_only() -> None:
    seen: list[set[str]] = []

    class Curious(DepthFL):
        def fit(self, task, model, memory, trainer):  # type: ignore[no-untyped-def]
            seen.append(set(memory.tensors))
            return super().fit(task, model, memory, trainer)

    memories, strategy = KeptMemories(), Curious(feddyn_alpha=0.1, num_clients=2)
    play(0, -1, memories, strategy)
    play(1, 0, memories, strategy)
    memory = memories.load(1)
    assert memory is not None
    own = {name for name in memory.tensors if not name.startswith(RESIDUAL)}
    assert [set(), own] == seen
    assert own
    assert len(own) < len(memory.tensors)
