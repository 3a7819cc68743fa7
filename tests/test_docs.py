"""The pages name files that exist, and link to files that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAX_FILES = 40
"""A reader can follow a round through this many files, not more."""

PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+)`")
ENTRY = re.compile(r"^(\d+)\. `([^`]+)`,((?:\s+`[\w.]+`,?)+):", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def entries() -> list[tuple[str, str, list[str]]]:
    """Number, path and names to look at."""
    text = (DOCS / "round.md").read_text(encoding="utf-8")
    return [(number, path, re.findall(r"`([\w.]+)`", names)) for number, path, names in ENTRY.findall(text)]


def test_round_names_each_file_once():
    paths = PATH.findall((DOCS / "round.md").read_text(encoding="utf-8"))
    assert [] == [path for path in paths if not (ROOT / path).is_file()]
    assert sorted(set(paths)) == sorted(paths)
    assert len(paths) <= MAX_FILES


def test_round_counts_its_files():
    numbers = [int(number) for number, _, _ in entries()]
    text = (DOCS / "round.md").read_text(encoding="utf-8")
    assert list(range(1, len(numbers) + 1)) == numbers
    assert numbers == [int(number) for number in re.findall(r"^(\d+)\. ", text, re.MULTILINE)]
    assert f"That is {len(numbers)} files." in text


def test_round_names_what_is_in_the_file():
    missing = [
        f"{path}: {name}"
        for _, path, names in entries()
        for name in names
        for part in name.split(".")
        if not re.search(rf"\b(def|class|message|rpc) {part}\b", (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert [] == missing


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = [target.partition("#")[0] for target in LINK.findall(page.read_text(encoding="utf-8"))]
    relative = [target for target in targets if target and "://" not in target]
    assert [] == [target for target in relative if not (page.parent / target).exists()]


@pytest.mark.parametrize("folder", [DOCS, DOCS / "decisions"], ids=lambda folder: folder.name)
def test_index_lists_every_page(folder):
    linked = set(LINK.findall((folder / "README.md").read_text(encoding="utf-8")))
    assert set() == {page.name for page in folder.glob("*.md")} - linked - {"README.md"}


def test_the_readme_has_the_newest_table_of_results():
    lines = (DOCS / "results.md").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| task | seeds |"))
    table = "\n".join(lines[first : lines.index("", first)])
    assert f"\n{table}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
