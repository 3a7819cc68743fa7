"""TensorBoard's own reader takes the event files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedel.cli.main import main
from fedel.errors import ConfigError
from fedel.report import tensorboard
from tests.report.made import write_run


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return write_run(tmp_path / "night", "fedel", 2.0, [0.1, None, 0.7], window=(1, 2))


def read(folder: Path) -> Any:
    """What TensorBoard itself reads."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_it(run: Any, tmp_path: Path) -> None:
    events = read(tensorboard.write(run, tmp_path / "tb").parent)
    assert [(1, pytest.approx(0.1)), (3, pytest.approx(0.7))] == [
        (event.step, event.value) for event in events.Scalars("model/accuracy")
    ]
    assert [2.0, 4.0, 6.0] == [event.wall_time for event in events.Scalars("round/latency_seconds")]
    assert [1.0] * 3 == [event.value for event in events.Scalars("client_deviation/one")]
    assert [2.0] * 3 == [event.value for event in events.Scalars("client_window_front/two")]


def test_written_again_it_replaces_the_file(run: Any, tmp_path: Path) -> None:
    tensorboard.write(run, tmp_path / "tb")
    again = tensorboard.write(run, tmp_path / "tb")
    assert [again] == list((tmp_path / "tb" / "night").iterdir())


def test_without_tensorboardx_the_error_says_what_to_install(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="pip install tensorboardX"):
        tensorboard.write(run, tmp_path / "tb")


def test_the_report_command_writes_it(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["report", str(run.path), "--tensorboard", str(tmp_path / "tb")])
    assert f"tensorboard --logdir {tmp_path / 'tb'}" in capsys.readouterr().out
    assert 3 == len(read(tmp_path / "tb" / "night").Scalars("round/num_updates"))
