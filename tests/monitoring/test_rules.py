"""Rules say what happened and what to do, use metrics that exist, and every alert is tried out by promtool."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from fedel.telemetry import REFUSALS
from tests.monitoring.files import PROMETHEUS, REPOSITORY, declared, load, metrics_in, recorded_in, rules

ALERTS = {rule["alert"]: rule for rule in rules("alert")}
CASES = [case for path in sorted((PROMETHEUS / "tests").glob("*.yml")) for case in load(path)["tests"]]
DOCS = (REPOSITORY / "docs" / "monitoring.md").read_text(encoding="utf-8")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is missing: apt-get install prometheus"
)


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", *sorted((PROMETHEUS / "rules").glob("*.yml")))


@needs_promtool
def test_rules_do_what_their_cases_say() -> None:
    promtool("test", "rules", *sorted((PROMETHEUS / "tests").glob("*.yml")))


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_what_happened_and_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description", "runbook"} == alert["annotations"].keys()
    assert f"docs/monitoring.md#{name.lower()}" in alert["annotations"]["runbook"]
    assert f"### {name}\n" in DOCS


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str) -> None:
    outcomes = {
        bool(t["exp_alerts"])
        for case in CASES
        for t in case.get("alert_rule_test", [])
        if t["alertname"] == name
    }
    assert {True, False} == outcomes


def test_every_recording_rule_has_a_case() -> None:
    tried = {t["expr"] for case in CASES for t in case.get("promql_expr_test", [])}
    assert {rule["record"] for rule in rules("record")} == tried


@pytest.mark.parametrize(
    "rule", [*rules("alert"), *rules("record")], ids=lambda r: r.get("alert") or r["record"]
)
def test_a_rule_uses_metrics_that_are_declared(rule: dict[str, Any]) -> None:
    assert set() == metrics_in(rule["expr"]) - declared()
    assert recorded_in(rule["expr"]) <= {rule["record"] for rule in rules("record")}


def test_every_reason_for_which_an_update_is_refused_starts_at_zero() -> None:
    found = {"disk"}
    for package in ("fedel", "services"):
        for path in (REPOSITORY / package).rglob("*.py"):
            found |= set(re.findall(r'UpdateRefused\(\s*"(\w+)"', path.read_text(encoding="utf-8")))
    assert found <= set(REFUSALS)
    assert "not_finite" in found
    assert sorted(REFUSALS) == list(REFUSALS)


def test_alerts_about_uploads_know_the_reasons_they_name() -> None:
    for name in ("FedelUploadsRefused", "FedelModelNotFinite"):
        for pattern in re.findall(r'reason[!=]~"([^"]+)"', ALERTS[name]["expr"]):
            assert set(pattern.split("|")) <= set(REFUSALS)
