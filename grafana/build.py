"""``python -m grafana.build`` writes the dashboards of ``boards/``, one module each, as JSON.

The JSON is committed; a test fails if it differs from what the code makes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana.boards import deviation, energy, latency, overview, services, tensors, traffic, windows

FOLDER = Path(__file__).parent / "dashboards"


def boards() -> dict[str, dict[str, Any]]:
    """All dashboards, by file name."""
    modules = (overview, latency, deviation, windows, tensors, traffic, energy, services)
    made = [module.board() for module in modules]
    return {f"{board['uid']}.json": board for board in made}


def text_of(board: dict[str, Any]) -> str:
    return json.dumps(board, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    wanted = boards()
    for name, board in wanted.items():
        (FOLDER / name).write_text(text_of(board), encoding="utf-8")
    for path in FOLDER.glob("*.json"):
        if path.name not in wanted:
            path.unlink()


if __name__ == "__main__":
    main()
