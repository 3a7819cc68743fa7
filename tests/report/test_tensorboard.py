"""TensorBoard's own reader takes the files; where it is not installed, a reader of the format does."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from fedel.cli.main import main
from fedel.report import runs, tensorboard
from tests.report.made import write_run


@pytest.fixture
def run(tmp_path: Path) -> Any:
    return write_run(tmp_path / "night", "fedel", 2.0, [0.1, None, 0.7], window=(1, 2))


def records(data: bytes) -> list[bytes]:
    """The records of a file, each checked against its checksums."""
    found = []
    while data:
        length, content = data[:8], data[12:]
        size = struct.unpack("<Q", length)[0]
        for part, checksum in ((length, data[8:12]), (content[:size], content[size : size + 4])):
            value = tensorboard.crc32c(part)
            masked = ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert masked == struct.unpack("<I", checksum)[0]
        found.append(content[:size])
        data = content[size + 4 :]
    return found


def test_a_file_has_a_version_and_a_record_for_each_round(run: Any, tmp_path: Path) -> None:
    file = tensorboard.write(run, tmp_path / "tb")
    version, *rounds = records(file.read_bytes())
    assert b"brain.Event:2" in version
    assert 3 == len(rounds)
    assert [True, False, True] == [b"model/accuracy" in data for data in rounds]
    assert b"client_window_front/two" in rounds[0]
    assert struct.pack("<f", 0.7) in rounds[2]


def test_written_again_it_replaces_the_file(run: Any, tmp_path: Path) -> None:
    first = tensorboard.write(run, tmp_path / "tb").read_bytes()
    again = tensorboard.write(run, tmp_path / "tb")
    assert first == again.read_bytes()
    assert [again] == list((tmp_path / "tb" / "night").iterdir())


def test_tensorboard_reads_it(run: Any, tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    file = tensorboard.write(run, tmp_path / "tb")
    events = accumulator.EventAccumulator(str(file.parent))
    events.Reload()
    assert [(1, pytest.approx(0.1)), (3, pytest.approx(0.7))] == [
        (event.step, event.value) for event in events.Scalars("model/accuracy")
    ]
    assert [2.0, 4.0, 6.0] == [event.wall_time for event in events.Scalars("round/latency_seconds")]
    assert [1.0] * 3 == [event.value for event in events.Scalars("client_deviation/one")]


def test_the_report_command_writes_it(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["report", str(run.path), "--tensorboard", str(tmp_path / "tb")])
    assert f"tensorboard --logdir {tmp_path / 'tb'}" in capsys.readouterr().out
    (file,) = (tmp_path / "tb" / "night").iterdir()
    assert 1 + len(runs.load(run.path).rounds) == len(records(file.read_bytes()))
