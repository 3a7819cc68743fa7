"""What the tests on a real node start from, without a node: the commands of the manual, and their manifests."""

from __future__ import annotations

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifests import kustomize, named, needs_kubectl, of_kind, rendered
from tests.deploy.node import printed
from tests.deploy.test_production import DEVICES, HOST, adapted, devices


@pytest.mark.parametrize(
    ("heading", "first_words"),
    [
        ("Try it", ["kubectl apply -k k8s/overlays/dev", "TOKEN="]),
        (
            "Production",
            [
                "kubectl apply -f k8s/overlays/production/",
                "kubectl apply -k k8s/overlays/production",
                f"HOST={HOST}",
            ],
        ),
        ("Agents on edge nodes", ["sudo install", "kubectl -n fedel exec coordinator-0"]),
        ("Backup", ["kubectl -n fedel create job backup-now", "BACKUP=", "NIGHT="]),
    ],
)
def test_the_manual_prints_the_commands_that_are_run(heading: str, first_words: list[str]) -> None:
    blocks = printed(heading)
    assert len(first_words) == len(blocks)
    for words, block in zip(first_words, blocks, strict=True):
        assert block.startswith(words)


@needs_kubectl
def test_production_and_its_devices_fit_the_schemas(tmp_path: Path) -> None:
    adapted(tmp_path)
    servers = list(yaml.safe_load_all(kustomize(tmp_path / "k8s/overlays/production")))
    public = [each for each in of_kind(servers, "Service") if "fedel/public" in each["metadata"]["labels"]]
    for number, service in enumerate(public):
        service["spec"]["clusterIP"] = f"10.96.0.{number + 10}"
    found = devices(public)
    for manifest in (*servers, *found):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    pods = named(found, "StatefulSet", "device")["spec"]
    assert len(DEVICES) == pods["replicas"]
    names = {name for alias in pods["template"]["spec"]["hostAliases"] for name in alias["hostnames"]}
    assert {
        f"{name}.{HOST}" for name in ("coordinator", "enrol", *(f"aggregator-{i}" for i in range(3)))
    } == names
    assert not of_kind(rendered("edge"), "StatefulSet"), "the overlay itself is as before"
