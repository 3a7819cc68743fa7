"""When a kept timing profile may be used again."""

from __future__ import annotations

from typing import Any

import pytest

from fedel.job import RunConfig
from fedel.testing import frozen_spec, spec
from fedel.training.profiler import cache_key


def key(table: dict[str, Any] | None = None, **changes: Any) -> str:
    given = {"spec": spec(), "input_shape": (1, 8, 8), "widths": (0.5,), "device": "cpu", "num_threads": 1}
    return cache_key(RunConfig.parse(table or {}), **{**given, **changes})


def test_the_same_step_has_the_same_key() -> None:
    other = {"seed": 9, "strategy": {"name": "fedavg"}, "work": {"lr": 0.5}}
    assert key() == key(other) == key({"workload": {"data_options": {"num_train": 100}}})


@pytest.mark.parametrize(
    "changes",
    [
        {"table": {"work": {"batch_size": 8}}},
        {"table": {"work": {"optimiser": "adamw"}}},
        {"table": {"workload": {"data": "mnist"}}},
        {"table": {"workload": {"data_options": {"augment": False}}}},
        {"spec": frozen_spec()},
        {"input_shape": (1, 16, 16)},
        {"widths": ()},
        {"num_threads": 2},
    ],
)
def test_what_changes_a_step_changes_the_key(changes: dict[str, Any]) -> None:
    assert key() != key(**changes)
