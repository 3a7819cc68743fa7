"""``examples/quickstart.ipynb`` runs from top to bottom, in a kernel as a reader has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_quickstart_notebook(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in shown if output.output_type == "error" or output.get("name") == "stderr"]
    texts = "".join(_texts(shown))
    assert "round  12/12" in texts
    assert "After the same time" in texts
    assert "<svg" in texts
    assert "\x1b" not in texts, "codes for a terminal"
    assert "of the test samples are right" in texts
    assert (tmp_path / "runs" / "compare-job" / "report.html").exists()


def _texts(shown: list[Any]) -> list[str]:
    return [
        str(output.get("text", "")) + "".join(map(str, output.get("data", {}).values())) for output in shown
    ]
