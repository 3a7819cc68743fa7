"""The verdict on a drill is not blind: what it must notice is planted in the files of a quiet one."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedel.chaos import verdict
from fedel.chaos.drill import draw, job_of, run_drill
from fedel.chaos.federation import COORDINATOR, Federation, Layout
from fedel.chaos.processes import Process
from fedel.chaos.verdict import Outcome

LAYOUT = Layout(num_agents=2, num_aggregators=1, small_disks=False)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a drill without faults."""
    folder = tmp_path_factory.mktemp("quiet")
    job = job_of(5, LAYOUT.num_agents, 3, {"name": "fedel"}, scale=1)
    outcome = asyncio.run(run_drill(replace(draw(1), layout=LAYOUT, job=job, faults=()), folder))
    assert [] == outcome.problems
    assert 6 == outcome.num_acknowledged == outcome.num_counted
    return folder


@pytest.fixture
def copy(quiet: Path, tmp_path: Path) -> Federation:
    """A copy of them to damage, as the drill sees it when all processes have ended."""
    made = Federation(LAYOUT, shutil.copytree(quiet, tmp_path / "copy"))
    made.database_url = f"sqlite:///{made.place(COORDINATOR) / 'coordinator.db'}"
    made.processes = {name: Process("", name, made.folder, {}) for name in LAYOUT.agents}
    return made


def problems(made: Federation) -> list[str]:
    outcome = Outcome(0, "")
    verdict.judge(made, outcome)
    return outcome.problems


def test_quiet_drill_is_sound(copy: Federation) -> None:
    assert [] == problems(copy)


def recount(made: Federation, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what version 2 says about who counts."""
    (run,) = (made.place("aggregator-0") / "data" / "runs").iterdir()
    kept, meta = run / "updates" / "000001" / "version.json", run / "versions" / "000002.json"
    table = json.loads(kept.read_text())
    change(table["counted"])
    for path in (kept, meta):
        path.write_text(json.dumps(table))


def test_acknowledged_update_that_does_not_count(copy: Federation) -> None:
    recount(copy, lambda counted: counted.pop("client-1"))
    lost = "lost: the update of client-1 of round 1 was acknowledged, but not counted"
    assert lost in problems(copy)


def test_update_that_counts_twice(copy: Federation) -> None:
    recount(copy, lambda counted: counted["client-1"].__setitem__(0, 0))
    assert any("of round 0 also counts in version 1" in problem for problem in problems(copy))


def test_other_bits_than_undisturbed(copy: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verdict.undisturbed

    def other(*arguments: Any) -> dict[str, Any]:
        model = {name: values.copy() for name, values in real(*arguments).items()}
        next(iter(model.values())).reshape(-1)[0] += 1
        return model

    monkeypatch.setattr(verdict, "undisturbed", other)
    assert ["has other bits than in an undisturbed run"] == [problem[-41:] for problem in problems(copy)]
