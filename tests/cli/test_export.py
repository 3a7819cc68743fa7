"""``fedel export`` and ``fedel exits``, and the files they write, read without FedEL."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fedel.api.results import load
from fedel.cli.main import main
from fedel.models import deploy, exported
from fedel.records import ExitTable
from tests.models.runs import EXAMPLES, HERE, Net, pictures, simulated

NAMED_PICTURES = f"{HERE}:pictures"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield simulated(tmp_path_factory.mktemp("runs") / "own", "own:model", "own:data")


@pytest.fixture(scope="module")
def bytes_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated(tmp_path_factory.mktemp("runs") / "bytes", f"{HERE}:Net", NAMED_PICTURES)


def fedel(*words: object) -> int:
    return main([str(word) for word in words])


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def stored() -> torch.Tensor:
    """Test images, 0 to 255."""
    return torch.from_numpy(pictures()[2]).float()


def test_a_plain_module_loads_the_file(bytes_run: Path, tmp_path: Path, capsys: Any) -> None:
    assert 0 == fedel("export", bytes_run, "--out", tmp_path / "net.safetensors", "--round", "last", "--json")
    said = printed(capsys)
    file = Path(said["file"])
    assert said["num_bytes"] == file.stat().st_size
    net = Net(3)
    net.load_state_dict(load_file(file))
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert {**metadata, "file": said["file"], "num_bytes": said["num_bytes"]} == said
    # What the metadata says is enough to use it.
    mean, std = (torch.tensor(json.loads(metadata[name])).reshape(1, -1, 1, 1) for name in ("mean", "std"))
    assert "(x / 255 - mean) / std" in metadata["input"]
    with torch.no_grad():
        logits = net.eval()((stored() / json.loads(metadata["scale"]) - mean) / std)
    torch.testing.assert_close(deploy.trained(bytes_run, round="last", normalise=True)(stored()), logits)
    assert ("bytes", "2", "FedEL", "4 of 4", ["0", "1", "2"], [3, 9, 9]) == (
        metadata["run"],
        metadata["round"],
        metadata["method"],
        metadata["exit"],
        json.loads(metadata["classes"]),
        json.loads(metadata["input_shape"]),
    )
    assert metadata["model"] == f"{HERE}:Net"
    assert 64 == len(metadata["job_sha256"])


def test_a_torch_program_takes_bytes_in_batches_of_any_size(bytes_run: Path, tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    assert 0 == fedel("export", bytes_run, "--format", "pt2", "--exit", 2, "--out", file)
    extra = {exported.EXTRA_FILE: ""}
    program = torch.export.load(file, extra_files=extra).module()
    expected = deploy.trained(bytes_run, 2, normalise=True)
    for x in (stored()[:1], stored()):
        torch.testing.assert_close(expected(x), program(x))
    assert "2 of 4" == json.loads(extra[exported.EXTRA_FILE])["exit"]


@pytest.mark.parametrize("exit", [None, 1])
def test_onnx_gives_the_logits_of_torch(own: Path, tmp_path: Path, exit: int | None) -> None:
    import own as users

    onnxruntime = pytest.importorskip("onnxruntime")
    file = tmp_path / "own.onnx"
    words = () if exit is None else ("--exit", exit)
    assert 0 == fedel("export", own, "--format", "onnx", "--out", file, *words)
    session = onnxruntime.InferenceSession(file)
    x = users.data()[2]
    for batch in (x[:1], x):
        (logits,) = session.run(["logits"], {"input": batch})
        torch.testing.assert_close(
            deploy.trained(own, exit)(torch.from_numpy(batch)), torch.from_numpy(logits), rtol=1e-4, atol=1e-5
        )
    metadata = session.get_modelmeta().custom_metadata_map
    assert f"{exit or 5} of 5" == metadata["exit"]
    assert "float32 of shape (N, 1, 16, 16), as in the data" == metadata["input"]


def test_onnx_normalises_unless_told_otherwise(bytes_run: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    x = stored().numpy()
    for flags, normalise in (((), True), (("--no-normalisation",), False)):
        file = tmp_path / f"{normalise}.onnx"
        assert 0 == fedel("export", bytes_run, "--format", "onnx", "--out", file, *flags)
        (logits,) = onnxruntime.InferenceSession(file).run(None, {"input": x})
        expected = deploy.trained(bytes_run, normalise=normalise)(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(expected, logits, rtol=1e-3, atol=1e-4)


def test_without_onnx_the_command_says_what_to_install(
    bytes_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert 2 == fedel("export", bytes_run, "--format", "onnx", "--out", tmp_path / "x.onnx")
    assert "needs the package 'onnxscript': pip install 'fedel[export]'" in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()


def test_what_is_printed(bytes_run: Path, capsys: Any) -> None:
    assert 0 == fedel("export", bytes_run, "--exit", 1)
    said = capsys.readouterr().out
    file = bytes_run / "bytes-exit1.safetensors"
    assert f"{file}: exit 1 of 4, round " in said
    assert "exit head: AdaptiveAvgPool2d" in said
    assert "mean: [" in said
    file.unlink()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--exit", "5"), 4, "there is no exit 5; model tests.models.runs:Net has the exits 1 to 4"),
        (("--round", "7"), 2, "did not keep the model of round 7"),
        (("--out", "model.safetensors"), 2, "is the run's own file"),
    ],
)
def test_wrong_words(
    bytes_run: Path, words: tuple[str, ...], code: int, said: str, capsys: Any, monkeypatch: Any
) -> None:
    before = (bytes_run / "model.safetensors").read_bytes()
    monkeypatch.chdir(bytes_run)
    assert code == fedel("export", bytes_run, *words)
    assert said in capsys.readouterr().err
    assert before == (bytes_run / "model.safetensors").read_bytes()


def test_an_unknown_format(bytes_run: Path, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        fedel("export", bytes_run, "--format", "tflite")
    assert "invalid choice: 'tflite'" in capsys.readouterr().err
    with pytest.raises(exported.ConfigError, match="'tflite' is not one of: safetensors, pt2, onnx"):
        exported.export(deploy.load(bytes_run), tmp_path / "x", "tflite")


def test_no_run(tmp_path: Path, capsys: Any) -> None:
    assert 2 == fedel("export", tmp_path / "none")
    assert "no such run directory; `fedel runs` lists all runs" in capsys.readouterr().err


def test_exits(bytes_run: Path, capsys: Any) -> None:
    assert 0 == fedel("exits", bytes_run, "--batch", 4, "--json")
    said = printed(capsys)
    rows = said["exits"]
    assert (4, [1, 2, 3, 4]) == (said["batch_size"], [row["exit"] for row in rows])
    assert ["entry", "first", "second", "classifier"] == [row["block"] for row in rows]
    *_, images, y = pictures()
    x = torch.from_numpy(images).float()
    for row in rows:
        module = deploy.trained(bytes_run, row["exit"], normalise=True)
        assert row["accuracy"] == pytest.approx((module(x).argmax(1).numpy() == y).mean())
        assert row["ms_per_sample"] > 0
    # Conv 3x4x3x3 + 4; exit 5 x 5 cells of 4 channels to 3 classes.
    assert 112 + 303 == rows[0]["num_parameters"] == rows[0]["num_bytes"] // 4
    assert rows[0]["ms_per_sample"] < rows[2]["ms_per_sample"]
    stored_table = ExitTable.from_json((bytes_run / "exits.json").read_bytes())
    assert rows == [asdict(row) for row in stored_table.exits]


def test_a_report_that_measures_the_exits_first(bytes_run: Path, tmp_path: Path, capsys: Any) -> None:
    (bytes_run / "exits.json").unlink(missing_ok=True)
    assert 0 == fedel("report", bytes_run, "--out", tmp_path)
    assert "Accuracy and time of the exits" not in (tmp_path / "report.html").read_text()
    assert 0 == fedel("report", bytes_run, "--out", tmp_path, "--exits")
    assert "Accuracy and time of the exits" in (tmp_path / "report.html").read_text()
    found = load(bytes_run)
    assert [1, 2, 3, 4] == [row.exit for row in found.exits("last").exits]
    assert found.figure("exits")._repr_svg_().startswith("<svg")


def test_exits_that_answer_together(tmp_path: Path, capsys: Any) -> None:
    strategy = {"name": "fedel", "window_within": True, "answer": 0.5}
    run = simulated(tmp_path / "run", f"{HERE}:Net", NAMED_PICTURES, strategy=strategy)
    assert 0 == fedel("exits", run)
    assert "Exits 3, 4 together, as the run tested them: " in capsys.readouterr().out
    found = ExitTable.from_json((run / "exits.json").read_bytes())
    assert ((3, 4), load(run).rounds[found.round - 1].accuracy) == (found.together, found.together_accuracy)


def test_exits_for_people(bytes_run: Path, capsys: Any) -> None:
    threads = torch.get_num_threads()
    assert 0 == fedel("exits", bytes_run)
    said = capsys.readouterr().out.splitlines()
    assert "exit  after block  accuracy  parameters" in said[0]
    assert 6 == len(said)
    assert "on one thread of this machine, one sample per call, median of repeats" in said[-1]
    assert threads == torch.get_num_threads()
    assert 2 == fedel("exits", bytes_run, "--batch", 0)
    assert "at least one sample" in capsys.readouterr().err
