"""The last lines of ``fedel demo``, from runs that are done."""

import json
from io import StringIO

from rich.console import Console

from fedel.cli import demo
from fedel.desk.local import LocalFleet
from fedel.job import RunConfig
from tests.report.made import write_run


def compare(tmp_path, as_json, width=80):
    fast = write_run(tmp_path / "fast", "fedel", 1.0, [0.2, 0.4, 0.6, 0.6])
    slow = write_run(tmp_path / "slow", "fedavg", 4.0, [0.5])
    console = Console(file=StringIO(), width=width)
    assert 0 == demo._compare([fast.path, slow.path], RunConfig(), LocalFleet(), console, as_json)
    return console.file.getvalue()


def test_the_headline_is_first_and_the_table_fits_into_80_columns(tmp_path):
    lines = compare(tmp_path, as_json=False).splitlines()
    assert "After the same time (4 s): FedEL 60.0 %, FedAvg 50.0 %." == lines[1]
    table = [line for line in lines if line.startswith(("method", "FedEL", "FedAvg"))]
    assert all(len(line) <= 80 for line in table)
    assert ["FedEL", "4", "45.0", "%", "60.0", "%", "60.0", "%"] == table[-2].split()[:8]
    assert lines[-1].endswith("report.html")


def test_json_has_numbers(tmp_path, capsys):
    assert "" == compare(tmp_path, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert [0.6, 0.5] == [run["accuracy"] for run in said["runs"]]
    assert said["verdicts"][0].startswith("After the same time")
    assert said["report"].endswith("report.html")
