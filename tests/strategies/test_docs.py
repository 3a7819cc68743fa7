"""The test that docs/own-method.md shows, run."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def test_own_method_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "own-method.md").read_text(), re.S)
    shown: dict[str, object] = {}
    exec(code, shown)
    shown["test_one_round"]()  # type: ignore[operator]
