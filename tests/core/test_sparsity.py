"""FIARSE's threshold and the factor of its gradient, by hand and against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedel.core.sparsity import gradient_factor, magnitude_threshold, maskable
from fedel.types import ModelSpec, Role, TensorSpec


def spec_of(shapes, roles=None):
    tensors = (TensorSpec(n, 1, s, (roles or {}).get(n, Role.WEIGHT)) for n, s in shapes.items())
    return ModelSpec("toy", ("only",), tuple(tensors))


def test_batch_norm_is_known_by_its_statistics():
    shapes = {"conv.weight": (4, 3, 3, 3), "bn.weight": (4,), "bn.bias": (4,), "bn.running_mean": (4,)}
    assert ("conv.weight",) == maskable(spec_of(shapes, {"bn.running_mean": Role.BUFFER}))


def test_exits_and_frozen_tensors_are_never_masked():
    shapes = {"conv.weight": (4, 3), "head.weight": (2, 4), "trunk.weight": (3, 3)}
    assert ("conv.weight",) == maskable(
        spec_of(shapes, {"head.weight": Role.EXIT, "trunk.weight": Role.FROZEN})
    )


@pytest.mark.parametrize(
    ("share", "expected"), [(1.0, 0.5), (0.75, 1.0), (0.5, 2.0), (0.49, 3.0), (0.25, 3.0), (0.0, 3.0)]
)
def test_threshold(share, expected):
    model = {"a": np.array([[1.0, -3.0]]), "b": np.array([0.5, -2.0]), "other": np.array([99.0])}
    assert expected == magnitude_threshold(model, ["a", "b"], share)


@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=30), st.floats(0, 1))
def test_threshold_keeps_the_share(values, share):
    model = {"w": np.array(values, np.float32)}
    kept = np.abs(model["w"]) >= np.float32(magnitude_threshold(model, ["w"], share))
    assert kept.sum() >= max(1, int(share * len(values)))


def test_factor():
    factor = gradient_factor(np.array([0.0, 0.9, 1.0, -1.0, 3.0, 1e6]), 1.0)
    np.testing.assert_allclose(factor, [0.0, 0.0, 1.5, 1.5, 1.375, 1.0], rtol=1e-5)


def test_factor_without_a_threshold():
    assert [1.0, 1.0] == gradient_factor(np.array([0.0, -2.0]), 0.0).tolist()


def test_factor_of_a_tensor_is_that_of_an_array():
    weights = np.random.default_rng(0).normal(size=50).astype(np.float32)
    ours = gradient_factor(torch.from_numpy(weights), 0.5).numpy()
    np.testing.assert_array_equal(gradient_factor(weights, 0.5), ours)
