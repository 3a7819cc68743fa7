"""Secure aggregation in a simulation: the model of a plain run, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedel.core.secure_sum import MIN_GROUP
from fedel.errors import ConfigError, UpdateRefused
from fedel.job import Protection, RunConfig
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.strategies.protection import RoundStart, check
from fedel.strategies.secure_fold import bytes_up
from fedel.types import ModelSpec, Patch, Report, TensorSpec, Update
from tests.simulation.history import History, Script, play_run
from tests.strategies.fakes import WORK, fleet, same_bits

FAULTS = Script(away={1: ["client-1"]}, broken={0: ["client-3"], 2: ["client-0", "client-5"]})


def run(strategy: str | dict[str, Any], secure: bool, faults: Script | None = None, **rounds: Any) -> History:
    table = {
        "strategy": {"name": strategy} if isinstance(strategy, str) else strategy,
        "rounds": {"num_rounds": 3, "deadline_factor": 1e12, **rounds},
        "work": vars(WORK),
        "protection": {"secure": secure},
    }
    return play_run(RunConfig.parse(table), fleet(7), faults=faults)


@pytest.mark.parametrize("faults", [None, FAULTS], ids=["all stay", "some drop out"])
def test_fedavg_has_the_bits_of_a_plain_run(faults: Script | None) -> None:
    plain, secure = run("fedavg", False, faults), run("fedavg", True, faults)
    assert same_bits(plain.model, secure.model)
    assert ([7, 7, 7] if faults is None else [6, 6, 5]) == [r.num_updates for r in secure.records]
    assert [r.tensor_clients for r in plain.records] == [r.tensor_clients for r in secure.records]


def test_a_simulation_ends_if_a_third_is_gone() -> None:
    gone = Script(broken={0: ["client-0", "client-2", "client-5"]})
    with pytest.raises(UpdateRefused, match="4 clients stayed to the end, 5 are needed"):
        run("fedavg", True, gone)


@pytest.mark.parametrize(
    "strategy",
    [
        "fedel",
        {"name": "fedel", "damping": 0.5, "weighting": "samples"},
        {"name": "pyramidfl", "drop_low": 0.4, "drop_high": 0.8},
    ],
    ids=["plain", "damped", "the absent count"],
)
def test_sums_what_enough_clients_trained(strategy: str | dict[str, Any]) -> None:
    plain, secure = run(strategy, False, num_rounds=1), run(strategy, True, num_rounds=1)
    (before,) = secure.models
    counts = plain.records[0].tensor_clients
    few = [name for name, count in counts.items() if 0 < count < MIN_GROUP]
    enough = [name for name, count in counts.items() if count >= MIN_GROUP]
    assert few
    assert enough
    for name in before:
        expected = before if name in few else plain.model
        assert expected[name].tobytes() == secure.model[name].tobytes(), name
    assert all(secure.records[0].tensor_clients[name] == 0 for name in few)


def test_bytes_are_those_of_the_messages() -> None:
    plain, secure = run("fedavg", False, num_rounds=1), run("fedavg", True, num_rounds=1)
    update = plain.updates[0][0]
    # Keys; a sealed share for each other; 8 bytes per value and for the weight; a share for each in the end.
    values = sum(patch.values.size + 1 for patch in update.patches.values())
    assert 96 + 6 * (12 + 132 + 16) + 8 * values + 7 * 66 == bytes_up(update.patches, 7)
    assert secure.records[0].bytes_up == sum(bytes_up(u.patches, 7) for u in secure.updates[0])


SPEC = ModelSpec("toy", ("one",), (TensorSpec("w", 1, (2,)),))


def test_values_that_do_not_fit_the_sum() -> None:
    fold = RoundFold(build({"name": "fedavg"}), SPEC, Protection(secure=True), RoundStart({}, secret=b"s"))
    fold.invite([f"c{n}" for n in range(1000)])
    report = Report("c1", 0, num_samples=100_000, num_steps=1, effective_steps=1.0, loss=0.0)
    with pytest.raises(UpdateRefused, match="too large for a secure sum"):
        fold.add(Update({"w": Patch(np.array([1, 100], np.float32))}, report))
    part = Patch(np.array([1], np.float32), (slice(0, 1),))
    with pytest.raises(ConfigError, match="parts of tensors"):
        fold.add(Update({"w": part}, report))


def test_what_secure_does_not_go_with() -> None:
    with pytest.raises(ConfigError, match="parts of tensors"):
        check(build({"name": "fiarse"}), SPEC, Protection(secure=True))
    with pytest.raises(ConfigError, match="late"):
        RunConfig.parse({"protection": {"secure": True}, "rounds": {"late": "next"}})
    assert replace(Protection(secure=True), secure=False) == Protection()
