"""The data stays on the devices: the desk has none, and each device has its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from fedel_edge.agent import Agent
from fedel_edge.config import AgentConfig
from rich.console import Console

from fedel.api.federation import first_model, one_run
from fedel.data.model_input import ModelInput
from fedel.errors import ConfigError, DataError
from fedel.job import RunConfig
from fedel.plugins import Allowed
from fedel.training.profile_io import save_profile
from fedel.v1 import coordinator_pb2 as pb
from tests.agents.stand_ins import running
from tests.federation.support import servers
from tests.services.coordinator.support import asynchronous
from tests.simulation import tiny

WORKLOAD = {
    "model": "cnn",
    "model_options": {"width": 0.25},
    "data": "tests.federation.test_data_on_devices:camera",
    "data_options": {"path": "x.npz"},
}
SAID = {"input": [1, 8, 8], "classes": 4}


def camera(path: str) -> tuple[np.ndarray, ...]:
    """What lies in this device's own folder; the test starts each agent with another one."""
    with np.load(path) as kept:
        x, y = kept["x"], kept["y"]
    return x[:-8], y[:-8], x[-8:], y[-8:]


def record(file: Path, classes: int, size: int = 8) -> None:
    rng = np.random.default_rng(classes)
    x = rng.standard_normal((48, 1, size, size)).astype(np.float32)
    np.savez(file, x=x, y=np.arange(48) % classes)


def job_of(**said: object) -> RunConfig:
    return RunConfig.parse(
        {
            "workload": {**WORKLOAD, **said},
            "strategy": {"name": "fedavg"},
            "rounds": {"num_rounds": 2, "min_clients": 2},
            "work": {"num_steps": 2, "batch_size": 4},
        }
    )


@asynccontextmanager
async def devices(
    address: str, folder: Path, classes: dict[str, int], size: int = 8
) -> AsyncIterator[list[Agent]]:
    """They get a timing profile: to measure one takes seconds."""
    save_profile(tiny.profile(first_model(job_of(**SAID))[1]), folder / "profile.json")
    async with AsyncExitStack() as stack:
        agents = []
        for name, number in classes.items():
            root = folder / name
            root.mkdir()
            record(root / "x.npz", number, size)
            allowed = Allowed(("tests.federation.test_data_on_devices",))
            agents.append(
                Agent(
                    AgentConfig(
                        address,
                        name,
                        root / "state",
                        threads=1,
                        profile=str(folder / "profile.json"),
                        code=allowed,
                    )
                )
            )
        for agent in agents:
            await stack.enter_async_context(running(agent))
        yield agents


@asynchronous
async def test_the_desk_has_no_data_and_a_device_may_lack_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One with more classes than the job says stays out."""
    monkeypatch.setattr("tests.federation.test_data_on_devices.camera", _per_device(tmp_path))
    async with servers(tmp_path) as made, devices(made.address, tmp_path, {"all": 4, "few": 2, "more": 5}):
        words = made.address, "night", job_of(**SAID), tmp_path / "run", Console(quiet=True)
        status = await one_run(*words)
    assert (pb.RUN_PHASE_FINISHED, 2) == (status.phase, status.model_version), status.message
    taken = ModelInput.load(tmp_path / "run")
    assert taken is not None
    assert ((1, 8, 8), ("0", "1", "2", "3")) == (taken.shape, taken.classes)
    rounds = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [2, 2] == [len({client["client"] for client in each["clients"]}) for each in rounds]
    assert "failed: the data" in caplog.text
    assert "does not fit the job: it has 5 classes, the job says 4" in caplog.text


def _per_device(folder: Path):  # type: ignore[no-untyped-def]
    """In turn: in this test all devices are in one process, and have one working directory."""
    names = iter(["all", "few", "more"])
    real = camera

    def read(path: str) -> tuple[np.ndarray, ...]:
        return real(str(folder / next(names) / path))

    return read


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"input": [3, 8, 8], "classes": 4}, r"shape \[1, 8, 8\], the job says input = \[3, 8, 8\]"),
        ({"input": [1, 8, 8], "classes": 3}, "it has 4 classes, the job says 3"),
        (
            {"input": [1, 8, 8], "classes": 4, "input_dtype": "int64"},
            "are float32, the job says input_dtype = 'int64'",
        ),
    ],
)
def test_a_device_with_other_data_stays_out(tmp_path: Path, said: dict[str, object], words: str) -> None:
    from fedel.training.factory import make_data

    record(tmp_path / "x.npz", 4)
    options = {"data_options": {"path": str(tmp_path / "x.npz")}}
    with pytest.raises(DataError, match=f"does not fit the job: .*{words}; mend the function"):
        make_data(job_of(**said, **options))


def test_without_data_and_without_words_the_desk_says_what_to_write() -> None:
    with pytest.raises(
        DataError, match=r"FileNotFoundError.*\[workload\] input = \[1, 28, 28\] and classes = 4"
    ):
        first_model(job_of())


def test_the_model_is_the_one_that_the_data_would_give(tmp_path: Path) -> None:
    record(tmp_path / "x.npz", 4)
    options = {"data_options": {"path": str(tmp_path / "x.npz")}}
    _, with_data, values = first_model(job_of(**options))
    _, without, same = first_model(job_of(**SAID))
    assert with_data.digest == without.digest
    assert all(np.array_equal(values[name], same[name]) for name in values)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"input": [1, 8]}, "input and classes go together"),
        ({"classes": 4}, "input and classes go together"),
        ({"input": [0, 8], "classes": 4}, "each size is above 0"),
        ({"input": [10**6, 10**6], "classes": 4}, "at most 10\\^9 values"),
        ({"input": [8], "classes": -1}, "classes = -1"),
        ({"input": [8], "classes": 4, "input_dtype": "object"}, "input_dtype = 'object' is not one of"),
        ({"input": [8], "classes": 1.5}, "classes = 1.5: expected tuple"),
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job_of(**said)


def test_classes_have_numbers_or_names() -> None:
    assert ("0", "1") == job_of(input=[8], classes=2).workload.class_names
    assert ("cat", "dog") == job_of(input=[8], classes=["cat", "dog"]).workload.class_names
