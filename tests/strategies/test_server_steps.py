"""What ``[server]`` does with a round: by hand, and against a loop in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedel import config
from fedel.errors import ConfigError
from fedel.job import RunConfig, Server
from fedel.roles.aggregator import Closed, RoundFold
from fedel.strategies import build
from fedel.strategies.protection import RoundStart
from fedel.strategies.server_steps import averages
from fedel.types import Array, ModelSpec, Patch, Report, Role, Tensors, TensorSpec, Update

SPEC = ModelSpec(
    "toy",
    ("one",),
    (
        TensorSpec("v", 1, (2,)),
        TensorSpec("w", 1, (1,)),
        TensorSpec("mean", 1, (1,), Role.BUFFER),
        TensorSpec("fixed", 1, (1,), Role.FROZEN),
    ),
)


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


START = {"v": f32(8, 8), "w": f32(-0.0), "mean": f32(1), "fixed": f32(5)}


def play(
    rounds: list[dict[str, Any]], strategy: str = "fedavg", one_by_one: bool = False, **server: float
) -> list[Closed]:
    """Rounds of one client, which sends these values or patches."""
    made: list[Closed] = []
    model: Tensors = START
    state: Tensors = {}
    for number, sent in enumerate(rounds):
        start = RoundStart(model, number)
        fold = RoundFold(build({"name": strategy}), SPEC, start=start, server=Server(**server))
        patches = {name: each if isinstance(each, Patch) else Patch(each) for name, each in sent.items()}
        fold.add(Update(patches, Report("client", number, 1, num_steps=1, effective_steps=1.0, loss=1.0)))
        closed = fold.finish(model, state)
        if one_by_one:
            new: dict[str, Array] = {}
            for name, old in model.items():
                part = fold.finish({name: old}, state)
                new, state = {**new, **part.model}, part.state
            assert {name: values.tobytes() for name, values in new.items()} == {
                name: values.tobytes() for name, values in closed.model.items()
            }
        else:
            state = closed.state
        model = closed.model
        made.append(Closed(model, state, closed.global_importance, closed.num_clients))
    return made


def test_an_average_by_hand() -> None:
    rounds = [{"v": f32(0, 4)}, {"v": f32(3, 4), "mean": f32(4)}, {"v": f32(7, 4)}]
    first, second, third = (averages(closed.state) for closed in play(rounds, average=0.5))
    # Weights of the newest: 1, 1 / 1.5, 1 / 1.75. What the run started from is not in it, but for a tensor
    # that kept these values.
    assert {"v": [0, 4]} == {name: values.tolist() for name, values in first.items()}
    np.testing.assert_allclose(second["v"], [2, 4], rtol=1e-7)
    np.testing.assert_allclose(second["mean"], [1 / 3 + 8 / 3], rtol=1e-7)
    np.testing.assert_allclose(third["v"], [4 / 7 * 7 + 3 / 7 * 2, 4], rtol=1e-7)
    np.testing.assert_allclose(third["mean"], [4 / 7 * 4 + 3 / 7 * 3], rtol=1e-7)
    assert {"v", "mean"} == third.keys()


def test_training_goes_on_from_the_plain_model() -> None:
    rounds = [{"v": f32(0, 4)}, {"v": f32(3, 4)}]
    plain, averaged = play(rounds), play(rounds, average=0.9)
    for one, other in zip(plain, averaged, strict=True):
        assert {name: values.tobytes() for name, values in one.model.items()} == {
            name: values.tobytes() for name, values in other.model.items()
        }
        assert one.global_importance == other.global_importance
    assert {} == averages(plain[-1].state)


def test_momentum_by_hand() -> None:
    rounds = [{"v": f32(6, 8), "mean": f32(3)}, {"w": f32(1)}, {"v": f32(5, 12), "mean": f32(4)}]
    first, second, third = play(rounds, momentum=0.5)
    assert [6, 8] == first.model["v"].tolist()
    assert [6, 8] == second.model["v"].tolist()  # nobody trained it: no step, and its momentum of -2 stays
    assert [6 - 1 - 1, 12] == third.model["v"].tolist()
    assert [3, 3, 4] == [closed.model["mean"].tolist()[0] for closed in (first, second, third)]
    assert START["w"].tobytes() == first.model["w"].tobytes()
    assert (6 - 4) ** 2 + (12 - 8) ** 2 == third.global_importance["v"]


def test_a_value_that_nobody_trained_stays_whatever_its_momentum() -> None:
    rounds = [{"v": f32(6, 6)}, {"v": Patch(f32(4), (slice(0, 1),))}]
    _, second = play(rounds, "heterofl", momentum=0.5)
    assert [4 - 1, 6] == second.model["v"].tolist()


def test_the_state_of_a_method_is_its_own() -> None:
    """FedDyn's memory is what it is without the average, and nothing of the server's reaches it."""
    table = {"name": "depthfl", "feddyn_alpha": 0.1, "num_clients": 2}
    states = []
    for server in (Server(), Server(average=0.5)):
        fold = RoundFold(build(table), SPEC, start=RoundStart(START), server=server)
        fold.add(Update({"v": Patch(f32(1, 2))}, Report("client", 0, 1, 1, 1.0, loss=1.0)))
        states.append(fold.finish(START, {"server/average/v": f32(0, 0)} if server.average else {}).state)
    assert states[0]["feddyn/v"].tobytes() == states[1]["feddyn/v"].tobytes()
    assert {"feddyn/v", "server/average/v"} == states[1].keys()


# What a mean rounds away would be no change: eighths are exact.
eighths = st.integers(-800, 800).map(lambda number: number / 8)
values = st.lists(eighths, min_size=2, max_size=2)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.one_of(st.none(), values), min_size=1, max_size=6),
    st.floats(0, 0.99),
    st.floats(0, 0.9),
    st.booleans(),
)
def test_equals_a_loop_in_double_precision(
    rounds: list[list[float] | None], average: float, momentum: float, one_by_one: bool
) -> None:
    sent = [{"v": f32(*numbers)} if numbers else {"w": f32(1)} for numbers in rounds]
    made = play(sent, one_by_one=one_by_one, average=average, momentum=momentum)
    old, speed = START["v"].astype(np.float64), np.zeros(2)
    total, weight = np.zeros(2), 0.0
    for closed, patches in zip(made, sent, strict=True):
        folded = patches.get("v", old).astype(np.float64)
        speed = np.where(folded != old, momentum * speed + (folded - old), speed)
        np.testing.assert_allclose(
            closed.model["v"], np.where(folded != old, old + speed, old), rtol=1e-5, atol=1e-4
        )
        # Both go on from what was stored, in float32.
        old = closed.model["v"].astype(np.float64)
        speed = closed.state.get("server/momentum/v", np.zeros(2)).astype(np.float64)
        total, weight = average * total + (1 - average) * old, average * weight + (1 - average)
        if average:
            tested = averages(closed.state).get("v", START["v"])
            np.testing.assert_allclose(tested, total / weight, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["average", "momentum"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_numbers_out_of_range(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{name} = .*below 1"):
        config.parse(RunConfig, {"server": {name: value}}, "job")
