"""What a round's fold refuses to make."""

from __future__ import annotations

import numpy as np
import pytest

from fedel.errors import VersionRefused
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.types import Array, ModelSpec, Patch, Report, TensorSpec, Update

SPEC = ModelSpec("toy", ("one",), (TensorSpec("v", 1, (1,)), TensorSpec("w", 1, (2,))))


def update(client: str, steps: float, v: Array, w: Array) -> Update:
    report = Report(client, 0, num_samples=10, num_steps=5, effective_steps=steps, loss=1.0)
    return Update({"v": Patch(v), "w": Patch(w)}, report)


def ones(size: int) -> Array:
    return np.ones(size, np.float32)


def test_version_that_is_not_finite() -> None:
    fold = RoundFold(build({"name": "fednova"}), SPEC)
    fold.add(update("evil", 2.0**55, ones(1), ones(2)))
    fold.add(update("good", 10.0, ones(1), ones(2)))
    model = {"v": ones(1), "w": np.full(2, 1e25, np.float32)}
    assert model["v"].tobytes() == fold.finish({"v": model["v"]}, {}).model["v"].tobytes()
    with pytest.raises(VersionRefused, match="tensor 'w'") as refused:
        fold.finish(model, {})
    assert "not_finite" == refused.value.reason


def test_memory_that_is_not_finite() -> None:
    fold = RoundFold(build({"name": "depthfl", "feddyn_alpha": 1e3, "num_clients": 1}), SPEC)
    fold.add(update("one", 1.0, ones(1), ones(2)))
    with pytest.raises(VersionRefused, match="tensor 'w'"):
        fold.finish({"w": np.full(2, 1e37, np.float32)}, {})


def test_a_tensor_is_finished_without_a_look_at_the_others() -> None:
    """A version is made tensor by tensor: its cost must not grow with their square."""
    fold = RoundFold(build({"name": "fedavg"}), SPEC)
    fold.add(update("one", 1.0, ones(1), ones(2)))
    assert {"v": 1} == fold.finish({"v": ones(1)}, {}).num_clients
