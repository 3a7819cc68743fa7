"""The code of docs/python.md runs as it is printed; names that it lists exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fedel

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text(encoding="utf-8")
STUB = Path(fedel.__file__).with_name("__init__.pyi").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert 3 == len(blocks)
    for block in blocks:
        exec(block, scope)
    loaded = fedel.load(scope["result"].path, model=scope["make_net"], data=scope["data"])
    assert not loaded.model().training
    assert "object:make_net-" in loaded.stored.settings["workload"]["model"]


def test_type_checkers_know_the_names_that_there_are() -> None:
    told = set(re.findall(r"import (\w+) as \1$", STUB, re.MULTILINE))
    assert told == {*fedel.__all__, "data", "models", "strategies"}
    assert all(getattr(fedel, name) for name in told)
