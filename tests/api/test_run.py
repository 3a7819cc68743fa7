"""``fedel.run``: real processes, also from a notebook; objects that cannot travel are refused."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import fedel
from fedel.api.federation import finished
from fedel.errors import ConfigError, ServiceError
from fedel.records import RoundRecord
from fedel.simulation.job import SimulationConfig
from fedel.strategies import FedAvg
from tests.api.support import WORKLOAD, net
from tests.simulation import tiny
from tests.strategies.fakes import same_bits

JOB: dict[str, Any] = {
    "rounds": {"num_rounds": 2, "min_clients": 1},
    "work": {"num_steps": 2, "batch_size": 8},
    "fleet": {"slowdowns": [1], "data": {"method": "iid"}},
}
NUM_ROUNDS = 40
"""Of a run that is stopped in its second round: some more are over before it hears of it."""


def in_a_notebook(function: Any) -> Any:
    """As a cell: its thread has an event loop that runs, and Ctrl-C is Python's own."""

    async def cell() -> Any:
        return function()

    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(cell())
    finally:
        loop.close()


def test_a_federation_from_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[RoundRecord] = []
    result = in_a_notebook(
        lambda: fedel.run(
            JOB, model=tiny.model, data=tiny.data, strategy=FedAvg(), name="night", progress=seen.append
        )
    )
    assert [0, 1] == [record.round for record in seen]
    assert seen == result.rounds
    assert Path("runs/night") == result.path
    assert (WORKLOAD["model"], "fedavg") == (
        result.stored.settings["workload"]["model"],
        result.result.strategy,
    )
    assert not result.model().training
    assert result == fedel.load("runs/night")
    with pytest.raises(ConfigError, match="exists already"):
        fedel.run(JOB, model=tiny.model, data=tiny.data, name="night")


def test_a_run_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On new processes, with what the first ones left on disk: no round is made twice."""
    monkeypatch.chdir(tmp_path)
    rounds = {"num_rounds": NUM_ROUNDS, "min_clients": 1, "keep_every": NUM_ROUNDS // 2}
    job = {**JOB, "rounds": rounds, "budget": {"pace": "plan"}}
    words: dict[str, Any] = {"model": tiny.model, "data": tiny.data, "strategy": FedAvg()}

    def impatient(record: RoundRecord) -> None:
        if record.round == 1:
            raise KeyboardInterrupt

    with pytest.raises(fedel.Stopped, match=r"--name night and --resume \(Python: name=, resume=True\)"):
        fedel.run(job, name="night", progress=impatient, **words)
    before = fedel.load("runs/night").rounds
    assert 2 <= len(before) < NUM_ROUNDS
    with pytest.raises(ConfigError, match="exists already: continue the run"):
        fedel.run(job, name="night", **words)
    with pytest.raises(ConfigError, match=r"cannot go on with work.num_steps = 3, the run was started with 2"):
        fedel.run(job, name="night", resume=True, overrides={"work.num_steps": 3}, **words)
    seen: list[RoundRecord] = []
    result = fedel.run(job, name="night", resume=True, progress=seen.append, **words)
    assert list(range(len(before), NUM_ROUNDS)) == [record.round for record in seen]
    assert list(range(NUM_ROUNDS)) == [record.round for record in result.rounds]
    assert before == result.rounds[: len(before)]
    whole = fedel.run(job, name="whole", progress=False, **words)
    assert same_bits(*(load_file(each.path / "model.safetensors") for each in (result, whole)))
    assert ["model-20.safetensors", "model-40.safetensors"] == sorted(
        file.name for file in result.path.glob("model-*.safetensors")
    )
    assert not result.model(round="20").training
    assert result == fedel.run(job, name="night", resume=True, **words)


def test_errors_and_answers_come_back_from_the_other_thread() -> None:
    async def answer() -> int:
        return 5

    async def fail() -> int:
        raise ServiceError("no space")

    assert (5, 5) == (finished(answer()), in_a_notebook(lambda: finished(answer())))
    with pytest.raises(ServiceError, match="no space"):
        in_a_notebook(lambda: finished(fail()))


def test_ctrl_c_in_a_notebook_ends_what_runs_beside_it() -> None:
    ended = threading.Event()

    async def endless() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        in_a_notebook(lambda: finished(endless()))
    assert ended.is_set()


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"model": net()}, "model"),
        ({"data": tiny.data()}, "data"),
        ({"data": lambda: tiny.data()}, "data"),
        ({"strategy": type("Mine", (FedAvg,), {"name": "mine"})}, "strategy"),
    ],
)
def test_objects_that_cannot_travel_are_refused(given: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{what}: this object lies in no module.*module:function.*simulate"
    ):
        fedel.run({**JOB, "workload": WORKLOAD}, out=tmp_path / "runs", **given)
    assert not (tmp_path / "runs").exists()


def test_a_simulation_is_not_a_federation() -> None:
    with pytest.raises(ConfigError, match=r"give its \.run"):
        fedel.run(SimulationConfig())
