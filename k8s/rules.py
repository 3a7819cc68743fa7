"""``python -m k8s.rules``: write Prometheus' rules in the form that the Prometheus Operator reads.

kustomize cannot put the content of a file into another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
RULES = ROOT / "prometheus" / "rules"
OUTPUT = ROOT / "k8s" / "monitoring" / "rules.yaml"
HEAD = "# Made by `python -m k8s.rules` from prometheus/rules/: change those.\n"


def resource() -> dict[str, Any]:
    """One ``PrometheusRule`` with the groups of all files."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yml"))]
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "fedel"},
        "spec": {"groups": [group for file in files for group in file["groups"]]},
    }


def text() -> str:
    return HEAD + yaml.safe_dump(resource(), sort_keys=False, width=112, allow_unicode=True)


if __name__ == "__main__":
    OUTPUT.write_text(text(), encoding="utf-8")
