"""docs/use-the-model.md: its commands and its code, run in order; the code without FedEL."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedel.cli.main import main
from fedel.models import deploy
from tests.models.runs import EXAMPLES, HERE, pictures, simulated

PAGE = (EXAMPLES.parent / "docs" / "use-the-model.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EXAMPLES / "own.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    simulated(tmp_path / "runs" / "own", "own:model", "own:data")
    names: dict[str, Any] = {}
    for language, text in BLOCK.findall(PAGE):
        if not language:
            _command_lines(text)
        if language != "python":
            continue
        with monkeypatch.context() as patch:
            if "from fedel" not in text:
                patch.setitem(sys.modules, "fedel", None)  # whatever imports it fails
            exec(text, names)
    x = names["x"]
    # As the page leaves them: the program, ONNX of exit 2, and the modules of the last block.
    torch.testing.assert_close(deploy.trained("runs/own")(x), names["program"](x))
    torch.testing.assert_close(names["net"](x), names["program"](x))
    expected = deploy.trained("runs/own", 2)(x)
    torch.testing.assert_close(expected, torch.from_numpy(names["logits"]), rtol=1e-4, atol=1e-5)
    assert "float32 of shape (N, 1, 16, 16), as in the data" == names["metadata_of"]("own.safetensors")["input"]


def _command_lines(text: str) -> None:
    for line in text.strip().splitlines():
        words = shlex.split(line)
        if words[0] == "fedel" and words[1] != "run":  # which took half a minute; the run is there
            assert 0 == main(words[1:]), line


def test_the_exit_in_plain_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(EXAMPLES / "own.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    simulated(tmp_path / "runs" / "own", "own:model", "own:data")
    import own

    _command_lines("fedel export runs/own --exit 2 --out small.safetensors")
    names: dict[str, Any] = {"own": own, "torch": torch, "x": torch.from_numpy(own.data()[2][:5])}
    (code,) = [text for _, text in BLOCK.findall(PAGE) if "exit_head" in text and "load_file" in text]
    exec("from safetensors.torch import load_file\n" + code, names)
    with torch.no_grad():
        torch.testing.assert_close(deploy.trained("runs/own", 2)(names["x"]), names["small"](names["x"]))


def test_the_page_prepares_images(tmp_path: Path) -> None:
    run = simulated(tmp_path / "bytes", f"{HERE}:Net", f"{HERE}:pictures", num_rounds=1)
    assert 0 == main(["export", str(run), "--out", str(tmp_path / "net.safetensors")])
    names: dict[str, Any] = {"torch": torch}
    (code,) = [text for _, text in BLOCK.findall(PAGE) if "def prepared" in text]
    exec(code.partition("\nprint")[0], names)
    images = torch.from_numpy(pictures()[2])
    prepared = names["prepared"](images, names["metadata_of"](tmp_path / "net.safetensors"))
    expected = deploy.trained(run, normalise=True)(images.float())
    torch.testing.assert_close(expected, deploy.trained(run)(prepared))
