"""Tests on clients' own data where people look: report, screen, page, CSV, trackers, metrics, result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fedel_coordinator.web import views
from prometheus_client import CollectorRegistry

from fedel import config
from fedel.client_tests import OwnScore, client_tests
from fedel.desk import screen
from fedel.records import RoundRecord, run_result
from fedel.report import page, runs, scalars, tables
from fedel.report.figures import figures
from fedel.telemetry import CoordinatorMetrics
from tests.report.fakes import round_record

SCORES = [
    OwnScore("a", "nano", 0.5, 1.5, 10),
    OwnScore("b", "orin", 0.9, 0.5, 30),
    OwnScore("c", "orin", 0.7, 1.0, 20),
]
TESTED = client_tests(SCORES, num_missing=1)


@pytest.fixture
def records() -> list[RoundRecord]:
    return [
        replace(round_record(round=n, version=n + 1), client_tests=TESTED if n == 1 else None) for n in range(3)
    ]


def stored(folder: Path, records: list[RoundRecord]) -> runs.StoredRun:
    folder.mkdir(exist_ok=True)
    (folder / "rounds.jsonl").write_text("".join(record.to_json() + "\n" for record in records))
    (folder / "config.toml").write_text(config.write({"strategy": {"name": "fedel"}}))
    return runs.load(folder)


def test_the_report_has_a_table(tmp_path: Path, records: list[RoundRecord]) -> None:
    run = stored(tmp_path / "night", records)
    (table,) = [each for each in page.run_tables([run]) if each.title == "On each client's own data"]
    assert [
        ("2", "all", "3", "70.0 %", "76.7 %", "50.0 %", "a", "16.3 %"),
        ("2", "nano", "1", "50.0 %", "50.0 %", "50.0 %", "a", "0.0 %"),
        ("2", "orin", "2", "80.0 %", "82.0 %", "70.0 %", "c", "10.0 %"),
    ] == [tuple(row[1:]) for row in table.rows]
    assert "On each client&#x27;s own data" in page.write([run], tmp_path).read_text()
    without = stored(tmp_path / "other", [replace(record, client_tests=None) for record in records])
    assert [] == [each for each in page.run_tables([without]) if "own data" in each.title]
    assert ("a", 2) == (figures(run).clients.worst_client, figures(run).device_types["orin"].num_clients)  # type: ignore[union-attr]
    columns = dict(zip(tables.COLUMNS, tables.rows(run)[1], strict=True))
    assert (0.5, pytest.approx(0.7)) == (columns["clients_worst_accuracy"], columns["clients_mean_accuracy"])
    assert columns["accuracy"] == records[1].accuracy


def test_screen_page_trackers_metrics_and_result(records: list[RoundRecord]) -> None:
    assert "(clients 70.0 %, worst 50.0 %)" in screen._line(records[1], 3)
    assert "clients" not in screen._line(records[0], 3)
    brief = views.brief(records[1], [])
    assert "clients" not in brief["client_tests"], "a thousand clients are not for the page"
    assert "a" == brief["client_tests"]["overall"]["worst_client"]
    assert pytest.approx(0.7) == dict(scalars.of_round(records[1]))["clients/mean_accuracy"]
    registry = CollectorRegistry()
    assert TESTED is not None
    CoordinatorMetrics(registry).observe_own_tests("night", TESTED)
    found = {
        statistic: registry.get_sample_value(
            "fedel_clients_accuracy_ratio", {"run": "night", "statistic": statistic}
        )
        for statistic in ("mean", "weighted", "worst", "deviation")
    }
    assert pytest.approx([0.7, 46 / 60, 0.5, 0.16329931]) == list(found.values())
    labels = {"run": "night", "device_type": "orin"}
    assert pytest.approx(0.8) == registry.get_sample_value("fedel_device_type_accuracy_ratio", labels)
    result = run_result(
        name="n",
        phase="finished",
        strategy="s",
        seed=0,
        scope="",
        weights=[],
        records=records,
        wall_seconds=1.0,
    )
    assert TESTED == result.client_tests
    assert result == type(result).from_json(result.to_json())
