"""What an agent must send and download, computed without one."""

from __future__ import annotations

from collections.abc import Collection

from fedel.roles.edge import KeptMemories, recall, run_task
from fedel.strategies import FedEL
from fedel.types import Memory, Update
from fedel.v1 import coordinator_pb2
from fedel.wire.codec import report_from_pb, task_from_pb
from fedel.wire.payload import pack
from tests.agents.stand_ins import SPEC, task_of
from tests.strategies.fakes import fleet, initial_model

CLIENT = fleet()["client-0"]
"""The agent's own trainer is the same."""


def expected_update(round_num: int, memories: KeptMemories, accepted_round: int = -1) -> Update:
    task, memory = task_from_pb(task_of(round_num), SPEC), recall(accepted_round, Memory(), memories)
    return run_task(FedEL(), task, memory, initial_model(), CLIENT, memories)


def same_patches(one: Update, other: Update) -> bool:
    return pack(one.patches).digest == pack(other.patches).digest


def size_of(names: Collection[str]) -> int:
    return sum(SPEC.by_name[name].num_bytes for name in names)


def needed_for(done: coordinator_pb2.TaskDone) -> frozenset[str]:
    window = report_from_pb(done.report).window
    assert window is not None
    return SPEC.tensors_for(SPEC.exits_for(window.end, window.front))
