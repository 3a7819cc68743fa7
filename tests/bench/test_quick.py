"""Hot paths, the stored ratios, and the command."""

from __future__ import annotations

import json

from fedel.bench import baseline, cpu, page
from fedel.bench.section import Options, sections
from fedel.bench.sections import floors, hot_paths
from fedel.cli.main import main


def silent(_line):
    pass


def test_hot_paths_have_a_floor_each(tmp_path):
    rows = list(hot_paths.measure(Options(quick=True, sizes=("XS",), folder=tmp_path), silent))
    names = {row["what"] for row in rows}
    assert len(names) == len(rows)
    assert {"decode chunks", "check and unpack", "journal", "download", "select tensors"} <= names
    assert {"fold, whole tensors", "fold, slices", "fold, bit masks", "plan a round"} <= names
    assert all(row["cpu_seconds"] > 0 < row["floor_cpu_seconds"] for row in rows)
    assert len(rows) == len(hot_paths.ratios(rows))
    assert any("| select tensors | one client" in line for line in hot_paths.show(rows))


def test_floors_are_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(floors, "_grpc", lambda options: {"bytes": 0, "error": "not today"})
    rows = list(floors.measure(Options(folder=tmp_path), silent))
    lines = floors.show(rows)
    assert 2 + len(rows) == len(lines)
    assert lines[-1].startswith("| gRPC stream, receive, add and send | not today |")


def test_the_least_of_a_few_repeats():
    calls = []
    assert 2 == len(cpu.least_cpu(lambda: calls.append(1), lambda: calls.append(2), repeats=1))
    assert {1, 2} == set(calls)


def test_says_what_got_slower(tmp_path):
    file = tmp_path / "baseline.json"
    baseline.write({"fold": 2.0, "journal": 1.0, "plan": 3.0}, file)
    now = {"fold": 2.1, "journal": 1.5, "plan": 2.0, "new": 7.0}
    lines = baseline.compare(now, baseline.read(file), margin=1.3)
    assert "| fold | 2.00 | 2.10 | 1.05 | same |" in lines
    assert "| journal | 1.00 | 1.50 | 1.50 | slower |" in lines
    assert "| plan | 3.00 | 2.00 | 0.67 | faster |" in lines
    assert "| new |  | 7.00 |  |  |" in lines
    assert "1 of 4 ratios are more than 1.3 times the stored ones: journal" == lines[-1]
    assert {} == baseline.read(tmp_path / "none.json")


def test_the_stored_ratios_are_those_of_sections():
    stored = baseline.read()
    assert stored
    assert {name.partition(":")[0] for name in stored} <= {section.name for section in sections()}


def test_the_command_writes_rows_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(floors, "_grpc", lambda options: {"bytes": 1, "cpu_seconds": 1e-9})
    words = [
        "bench",
        "--sections",
        "floors",
        "--out",
        str(tmp_path / "out"),
        "--page",
        str(tmp_path / "page.md"),
    ]
    assert 0 == main(words)
    assert "## What the machine can do" in (tmp_path / "page.md").read_text()
    rows = [json.loads(line) for line in (tmp_path / "out" / "rows.jsonl").read_text().splitlines()]
    assert 5 == len(page.of(rows, "floors"))
    capsys.readouterr()
    assert 0 == main(words)
    assert "floors: measured before" in capsys.readouterr().out
