"""The toy problem as fixtures."""

from __future__ import annotations

import pytest

from fedel.data.dataset import Dataset
from fedel.models.blocks import BlockModel
from fedel.types import BlockTime, LocalWork, TensorTime, TimingProfile

from .toys import make_data, make_model


@pytest.fixture
def plain() -> BlockModel:
    return make_model(norm=False)


@pytest.fixture
def normed() -> BlockModel:
    return make_model(norm=True)


@pytest.fixture(scope="session")
def data() -> Dataset:
    return make_data()


@pytest.fixture
def work() -> LocalWork:
    return LocalWork(num_steps=5, batch_size=16, lr=0.05, momentum=0.9, weight_decay=1e-2)


@pytest.fixture
def profile() -> TimingProfile:
    return TimingProfile("none", "toy", 16, (TensorTime("w", 1, 0.0, 0.0),), (BlockTime(0.0),) * 4)
