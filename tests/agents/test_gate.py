"""The agent's gate: good messages pass, and each kind of bad one is refused with its reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from fedel_edge import gate
from fedel_edge.disk import forget_profiles, make_room
from fedel_edge.gate import Limits
from fedel_edge.run_folder import RunFolder
from hypothesis import given
from hypothesis import strategies as st

from fedel.errors import ServiceError
from fedel.job import RunConfig
from fedel.types import Memory, Window
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1 import task_pb2
from tests.agents.stand_ins import SPEC, task_of
from tests.strategies.fakes import fleet

TRAINER, JOB = fleet()["client-0"], RunConfig()
NAMES = [tensor.name for tensor in SPEC.tensors]


def objection(task: task_pb2.Task, limits: Limits | None = None, slowdown: float = 1.0) -> str:
    return gate.objection_to_task(task, "client-1", JOB, TRAINER, slowdown, limits or Limits())


def changed(**changes: Any) -> task_pb2.Task:
    """A good task with some fields replaced; ``work__lr`` is a field of its work."""
    task = task_of(3, accepted_round=2, memory=Memory(Window(1, 2), tuple(NAMES[:2])))
    task.global_importance[:] = [0.5] * len(NAMES)
    task.settings["width"] = 0.5
    for path, value in changes.items():
        *parents, field = path.split("__")
        message: Any = task
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, dict):
            getattr(message, field).update(value)
        elif isinstance(value, list):
            getattr(message, field)[:] = value
        else:
            setattr(message, field, value)
    return task


def test_good_tasks_pass() -> None:
    assert "" == objection(changed()) == objection(task_of(0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"client": "other"}, "the task is for client 'other'"),
        ({"round_num": -1}, "round_num is -1"),
        ({"model_version": -1}, "model_version is -1"),
        ({"accepted_round": 4}, "accepted_round is 4"),
        ({"accepted_round": -2}, "accepted_round is -2"),
        ({"seed": -1}, "seed is -1"),
        ({"budget_seconds": math.nan}, "budget_seconds is nan"),
        ({"budget_seconds": -0.1}, "budget_seconds is -0.1"),
        ({"deadline_seconds": math.nan}, "deadline_seconds is nan"),
        ({"deadline_seconds": math.inf}, "deadline_seconds is inf"),
        ({"work__num_steps": -1}, "num_steps is -1"),
        ({"work__num_steps": 2**31 - 1}, "num_steps is"),
        ({"work__num_steps": 9_999_999}, "limits.max_task_seconds"),
        ({"work__num_steps": 0, "work__num_epochs": 9_999_999}, "limits.max_task_seconds"),
        ({"work__batch_size": 0}, "batch_size is 0"),
        ({"work__batch_size": 33}, "this device measured 32"),
        ({"work__optimiser": "os.system"}, "neither sgd nor adamw"),
        ({"work__lr": math.inf}, "lr is inf"),
        ({"work__momentum": -1.0}, "momentum is -1"),
        ({"settings": {"width": math.nan}}, "width is nan"),
        ({"settings": {"x" * 300: 1.0}}, "a setting has 300 letters"),
        ({"settings": {str(n): 0.0 for n in range(1001)}}, "1002 settings"),
        ({"global_importance": [0.5]}, "global_importance has 1 values"),
        ({"global_importance": [0.5] * (len(NAMES) + 1)}, "global_importance has"),
        ({"global_importance": [-1.0] * len(NAMES)}, "global_importance 0 is -1"),
        ({"memory__end_block": 0}, "blocks 0 to 2"),
        ({"memory__front_block": 99}, "blocks 1 to 99"),
        ({"memory__selected": ["no such tensor"]}, "the model does not have"),
        ({"memory__selected": [NAMES[0]] * 2}, "one of them twice"),
        ({"memory__resets": -1}, "resets is -1"),
    ],
)
def test_bad_tasks(changes: dict[str, Any], words: str) -> None:
    assert words in objection(changed(**changes))


def test_the_owner_decides_how_long_a_task_may_take() -> None:
    assert "limits.max_task_seconds" in objection(changed(), Limits(max_task_seconds=0.001))
    assert "limits.max_task_seconds" in objection(changed(), slowdown=1e9)


numbers = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-3, 100))
doubles = st.floats(allow_nan=True, allow_infinity=True, width=64)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "round_num": numbers,
            "model_version": numbers,
            "accepted_round": numbers,
            "seed": st.integers(-(2**63), 2**63 - 1),
            "budget_seconds": doubles,
            "deadline_seconds": doubles,
            "work__num_steps": numbers,
            "work__num_epochs": numbers,
            "work__batch_size": numbers,
            "work__lr": doubles,
            "work__optimiser": st.text(max_size=5),
            "settings": st.dictionaries(st.text(max_size=300), doubles, max_size=3),
            "global_importance": st.lists(doubles, max_size=2 * len(NAMES)),
            "memory__end_block": numbers,
            "memory__front_block": numbers,
            "memory__resets": numbers,
            "memory__selected": st.lists(st.sampled_from([*NAMES, "", "x"]), max_size=4),
        },
    )
)
def test_the_gate_never_stumbles(changes: dict[str, Any]) -> None:
    task = changed(**changes)
    wrong = objection(task)
    assert wrong.isprintable()
    assert len(wrong) < 1000
    if not wrong:
        assert 0 <= task.budget_seconds <= gate.MAX_SECONDS
        assert 1 <= task.work.batch_size <= 32
        assert len(task.global_importance) in (0, len(NAMES))


@given(st.binary(max_size=200))
def test_any_offer(data: bytes) -> None:
    text = data.decode(errors="replace")
    offer = pb.RunOffer(run=text, config_json=text, model_digest=text, instance=text)
    assert gate.objection_to_offer(offer)
    offer.shards.add(address=text, tensors=[text])
    assert isinstance(gate.objection_to_offer(offer), str)


@pytest.mark.parametrize(
    ("text", "shown"), [("fine", "fine"), ("a\x1b]0;x\x07\nb", "a ]0;x  b"), ("x" * 2000, "x" * 1000 + "...")]
)
def test_texts_are_cleaned(text: str, shown: str) -> None:
    assert shown == gate.clean(text)


@pytest.mark.parametrize("field", ["max_task_seconds", "max_prepare_seconds", "max_runs", "max_disk_bytes"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_limits_are_above_zero(field: str, value: float) -> None:
    if "seconds" in field or value <= 0:
        with pytest.raises(ValueError, match="must be above 0"):
            Limits(**{field: value})  # type: ignore[arg-type]


def made(state_dir: Path, run: str, num_bytes: int = 0) -> Path:
    path = RunFolder(state_dir, run, "1").path
    (path / "model").write_bytes(b"x" * num_bytes)
    return path


def test_old_runs_make_room(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    folders = [made(tmp_path, f"run-{n}") for n in range(4)]
    make_room(tmp_path, "new", SPEC, {"run-0"}, Limits(max_runs=3))
    assert [True, False, False, True] == [folder.exists() for folder in folders]
    assert (tmp_path / "data").exists(), "it is not of a run"


def test_runs_that_go_on_are_never_deleted(tmp_path: Path) -> None:
    needed = 6 * 4 * sum(tensor.size for tensor in SPEC.tensors)
    one, two = made(tmp_path, "one", 10_000), made(tmp_path, "two", 10_000)
    make_room(tmp_path, "one", SPEC, {"two"}, Limits(max_disk_bytes=needed + 11_000))
    with pytest.raises(ServiceError, match="max_disk_bytes"):
        make_room(tmp_path, "new", SPEC, {"one", "two"}, Limits(max_disk_bytes=needed + 11_000))
    assert one.exists()
    assert two.exists()
    make_room(tmp_path, "new", SPEC, {"two"}, Limits(max_disk_bytes=needed + 11_000))
    assert [False, True] == [one.exists(), two.exists()]


def test_old_profiles_are_deleted(tmp_path: Path) -> None:
    for number in range(70):
        (tmp_path / f"profile-{number}.json").touch()
    forget_profiles(tmp_path)
    assert 64 == len(list(tmp_path.iterdir()))
