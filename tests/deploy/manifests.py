"""The overlays of k8s/ as kustomize renders them, and what is looked up in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
EXPOSED = ("gateway", "gateway-v1alpha2", "ingress-nginx", "ingress-traefik", "load-balancer")
"""Components of which one is chosen."""
EVERYTHING = "production+gateway+monitoring+backup+login+own-authority"
SNAPSHOTS = "production+backup-snapshots"
OVERLAYS = ("dev", "edge", "production", EVERYTHING, SNAPSHOTS, *(f"production+{name}" for name in EXPOSED[1:]))
"""An overlay, and the components that it takes."""
KUBECTL = shutil.which("kubectl") or shutil.which("kubectl", path=str(Path.home() / ".cache/fedel/bin"))
Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl is missing: install it, or let .ci/run put it into ~/.cache/fedel/bin"
)


def write_overlay(folder: Path, overlay: str, **settings: str) -> Path:
    """A copy of an overlay outside the repository, with its components and settings, as users make one."""
    name, *components = overlay.split("+")
    shutil.copytree(K8S / "overlays" / name, folder, dirs_exist_ok=True)
    path = folder / "kustomization.yaml"
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    table["resources"] = [each.replace("../..", os.path.relpath(K8S, folder)) for each in table["resources"]]
    table["components"] = [os.path.relpath(K8S / "components" / each, folder) for each in components]
    path.write_text(yaml.safe_dump(table), encoding="utf-8")
    if settings:
        path = folder / "settings.yaml"
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
        table["data"] |= {key.replace("_", "-"): value for key, value in settings.items()}
        path.write_text(yaml.safe_dump(table), encoding="utf-8")
    return folder


def kustomize(folder: Path) -> str:
    done = subprocess.run([str(KUBECTL), "kustomize", folder], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert not done.stderr, "kustomize warns"
    return done.stdout


@cache
def _rendered(overlay: str) -> str:
    if "+" not in overlay:
        return kustomize(K8S / "overlays" / overlay)
    with tempfile.TemporaryDirectory() as name:
        return kustomize(write_overlay(Path(name).resolve(), overlay))


def rendered(overlay: str) -> list[Manifest]:
    """Fresh copies, so that a test may spoil them."""
    return list(yaml.safe_load_all(_rendered(overlay)))


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    (found,) = (each for each in of_kind(manifests, kind) if each["metadata"]["name"] == name)
    return found


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


def container(template: Manifest, name: str) -> Manifest:
    (found,) = (each for each in containers(template) if each["name"] == name)
    return found


def environment(found: Manifest) -> dict[str, str]:
    """The variables of a container whose values are in the manifest."""
    return {each["name"]: each["value"] for each in found.get("env", []) if "value" in each}


def arguments(found: Manifest) -> list[str]:
    """The arguments of a container after its variables are put in, as the kubelet does it."""
    words: list[str] = found["args"]
    for name, value in environment(found).items():
        words = [word.replace(f"$({name})", value) for word in words]
    return words


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector (``matchLabels``, ``In`` expressions) picks these labels."""
    wanted = {key: [value] for key, value in selector.get("matchLabels", {}).items()}
    wanted |= {each["key"]: each["values"] for each in selector.get("matchExpressions", [])}
    return all(labels.get(key) in values for key, values in wanted.items())
