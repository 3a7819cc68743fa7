"""The overlays of k8s/ as kustomize renders them, and what is looked up in them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
OVERLAYS = ("dev", "production")
KUBECTL = shutil.which("kubectl") or shutil.which("kubectl", path=str(Path.home() / ".cache/fedel/bin"))
Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl is missing: install it, or let .ci/run put it into ~/.cache/fedel/bin"
)


@cache
def _rendered(overlay: str) -> str:
    folder = ROOT / "k8s" / "overlays" / overlay
    done = subprocess.run([str(KUBECTL), "kustomize", folder], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert not done.stderr, "kustomize warns"
    return done.stdout


def rendered(overlay: str) -> list[Manifest]:
    """Fresh copies, so that a test may spoil them."""
    return list(yaml.safe_load_all(_rendered(overlay)))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def names(manifests: list[Manifest], kind: str) -> set[str]:
    return {manifest["metadata"]["name"] for manifest in of_kind(manifests, kind)}


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """The pods of everything that makes pods, with the name of what makes them."""
    for manifest in of_kind(manifests, "StatefulSet", "Deployment", "DaemonSet", "Job"):
        yield manifest["metadata"]["name"], manifest["spec"]["template"]
    for manifest in of_kind(manifests, "CronJob"):
        yield manifest["metadata"]["name"], manifest["spec"]["jobTemplate"]["spec"]["template"]


def containers(template: Manifest) -> list[Manifest]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector (``matchLabels``, ``In`` expressions) picks these labels."""
    wanted = {key: [value] for key, value in selector.get("matchLabels", {}).items()}
    wanted |= {each["key"]: each["values"] for each in selector.get("matchExpressions", [])}
    return all(labels.get(key) in values for key, values in wanted.items())
