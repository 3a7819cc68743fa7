"""What is in prometheus/ and grafana/, as tests look at it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from fedel.telemetry import AccessMetrics, AgentMetrics, AggregatorMetrics, CoordinatorMetrics, build_info

REPOSITORY = Path(__file__).parents[2]
PROMETHEUS = REPOSITORY / "prometheus"
DASHBOARDS = sorted((REPOSITORY / "grafana" / "dashboards").glob("*.json"))
_NAME = re.compile(r"\bfedel_\w+")
_RECORDED = re.compile(r"\b\w+:fedel_\w+:\w+")


def load(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def rules(kind: str) -> list[dict[str, Any]]:
    """Every rule that is an ``alert``, or a ``record``."""
    groups = [g for path in sorted((PROMETHEUS / "rules").glob("*.yml")) for g in load(path)["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Those that show something, also inside rows."""
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def panel_expressions() -> list[str]:
    return [t["expr"] for path in DASHBOARDS for panel in panels(load(path)) for t in panel["targets"]]


def metrics_in(expr: str) -> set[str]:
    """Names of our own metrics, without those that recording rules make."""
    return set(_NAME.findall(_RECORDED.sub("", expr)))


def recorded_in(expr: str) -> set[str]:
    return set(_RECORDED.findall(expr))


def declared() -> set[str]:
    """Every name that a process can show, as Prometheus sees it."""
    names = set()
    shown = (
        CoordinatorMetrics,
        AggregatorMetrics,
        AgentMetrics,
        AccessMetrics,
        lambda r: build_info(r, "test"),
    )
    for declare in shown:
        registry = CollectorRegistry()
        declare(registry)
        names |= set(registry._names_to_collectors)
    return names
