"""``fedel runs`` lists every run of a directory: good, empty, at chance, diverged and damaged ones."""

import json

from fedel.cli.main import main
from tests.report.made import write_run

REFUSED = {"one": "the report of client 'one': loss is nan: training diverged, try a lower learning rate"}


def make_runs(place):
    write_run(place / "good", accuracies=[0.1, 0.75])
    write_run(place / "empty", finished=False)
    write_run(place / "guessing", accuracies=[0.1] * 4, num_classes=10)
    write_run(
        place / "diverged",
        accuracies=[0.1],
        of_round=lambda _: {"num_updates": 0, "clients": (), "refused": REFUSED},
    )
    damaged = write_run(place / "broken", accuracies=[0.1])
    (damaged.path / "rounds.jsonl").write_text("{}\n")
    (place / "no run").mkdir()


def test_json_has_numbers_for_every_run(tmp_path, capsys):
    make_runs(tmp_path)
    assert 0 == main(["runs", "--out", str(tmp_path), "--json"])
    found = {row["run"].rpartition("/")[2]: row for row in json.loads(capsys.readouterr().out)}
    assert {"good", "empty", "guessing", "diverged", "broken"} == found.keys()
    assert ("finished", 2, 0.75, False, "") == tuple(
        found["good"][key] for key in ("phase", "rounds", "accuracy", "report", "message")
    )
    assert ("unfinished", 0, None) == tuple(found["empty"][key] for key in ("phase", "rounds", "accuracy"))
    assert "at chance for 10 classes" == found["guessing"]["message"]
    assert found["diverged"]["message"].startswith("no update counted: loss is nan: training diverged")
    assert ("damaged", None) == (found["broken"]["phase"], found["broken"]["rounds"])
    assert "delete the line to continue" in found["broken"]["message"]


def test_the_table_says_it_in_words(tmp_path, capsys):
    make_runs(tmp_path)
    assert 0 == main(["runs", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    good = next(line for line in lines if "/good" in line)
    assert ["fedel", "finished", "2", "75.0", "%", "no"] == good.split()[1:]
    assert any("/empty" in line and " - " in line for line in lines)


def test_without_messages_there_is_no_column_for_them(tmp_path, capsys):
    write_run(tmp_path / "good", accuracies=[0.5])
    assert 0 == main(["runs", "--out", str(tmp_path)])
    assert ["run", "strategy", "phase", "rounds", "accuracy", "report"] == capsys.readouterr().out.split()[:6]


def test_nothing_is_cut_in_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    make_runs(tmp_path)
    assert 0 == main(["runs", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert 6 == len(lines)
    assert f"{tmp_path}/diverged" in lines[2]
    assert "training diverged, try a lower learning rate" in lines[2]
