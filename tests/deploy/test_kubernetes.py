"""Every overlay renders, fits the schemas strictly, keeps the policy, and refers to what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.config import CoordinatorConfig

from fedel import __version__, config
from k8s import rules
from tests.deploy.manifests import (
    OVERLAYS,
    ROOT,
    Manifest,
    containers,
    matches,
    names,
    needs_kubectl,
    of_kind,
    pod_templates,
    rendered,
)
from tests.deploy.policy import complaints

OF_OTHERS = {"monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
"""Custom resources, whose schemas do not come with Kubernetes."""
pytestmark = needs_kubectl
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@each_overlay
def test_fits_the_schemas_of_kubernetes(overlay: str) -> None:
    checked = [manifest for manifest in rendered(overlay) if manifest["apiVersion"] not in OF_OTHERS]
    assert len(checked) > 10
    for manifest in checked:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_key_is_found() -> None:
    manifest = of_kind(rendered("dev"), "StatefulSet")[0]
    manifest["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@each_overlay
def test_pods_follow_the_policy(overlay: str) -> None:
    jobs = names(rendered(overlay), "CronJob")
    for name, template in pod_templates(rendered(overlay)):
        assert [] == list(complaints(name, template, runs_for_ever=name not in jobs))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda spec: spec["securityContext"].pop("runAsNonRoot"), "root"),
        (lambda spec: spec["securityContext"].pop("seccompProfile"), "seccomp"),
        (lambda spec: spec.update(hostNetwork=True), "namespace of the host"),
        (lambda spec: spec["volumes"].append({"name": "x", "hostPath": {"path": "/"}}), "path of the host"),
        (lambda spec: spec.pop("automountServiceAccountToken"), "token"),
        (lambda spec: spec["containers"][0]["resources"]["limits"].pop("memory"), "no limits of memory"),
        (lambda spec: spec["containers"][0].pop("readinessProbe"), "no readinessProbe"),
        (lambda spec: spec["containers"][0]["securityContext"].pop("readOnlyRootFilesystem"), "be written"),
        (lambda spec: spec["containers"][0]["securityContext"].pop("capabilities"), "capabilities"),
        (lambda spec: spec["containers"][0].update(image="fedel-server:latest"), "names no version"),
        (lambda spec: spec["containers"][0].update(env=[{"name": "A_TOKEN", "value": "x"}]), "a secret"),
    ],
)
def test_the_policy_finds_violations(spoil: Callable[[Manifest], object], said: str) -> None:
    name, template = next(pod_templates(rendered("dev")))
    spoil(template["spec"])
    (found,) = complaints(name, template)
    assert said in found


@each_overlay
def test_references_of_a_pod_exist(overlay: str) -> None:
    manifests = rendered(overlay)
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    for _, template in pod_templates(manifests):
        spec = template["spec"]
        assert spec["serviceAccountName"] in names(manifests, "ServiceAccount")
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names(manifests, "ConfigMap")
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in names(manifests, "PersistentVolumeClaim")
            if "secret" in volume:
                assert f"`{volume['secret']['secretName']}`" in page, (
                    "a secret that the manual does not mention"
                )
        for container in containers(template):
            for variable in container.get("env", []):
                secret = variable.get("valueFrom", {}).get("secretKeyRef")
                assert secret is None or f"`{secret['name']}`" in page


@each_overlay
def test_selectors_and_ports_match_a_pod(overlay: str) -> None:
    manifests = rendered(overlay)
    pods = [template for _, template in pod_templates(manifests)]

    def picked(selector: Manifest) -> list[Manifest]:
        return [pod for pod in pods if matches(selector, pod["metadata"]["labels"])]

    def ports(selector: Manifest) -> set[str | int]:
        running = [container for pod in picked(selector) for container in pod["spec"]["containers"]]
        found = [port for container in running for port in container.get("ports", [])]
        return {port["name"] for port in found} | {port["containerPort"] for port in found}

    for service in of_kind(manifests, "Service"):
        labels = {k: v for k, v in service["spec"]["selector"].items() if not k.startswith("statefulset")}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports({"matchLabels": labels})
    for budget in of_kind(manifests, "PodDisruptionBudget"):
        assert picked(budget["spec"]["selector"])
    for policy in of_kind(manifests, "NetworkPolicy"):
        assert picked(policy["spec"]["podSelector"])
        for rule in policy["spec"].get("ingress", []):
            assert {port["port"] for port in rule["ports"]} <= ports(policy["spec"]["podSelector"])


def table(manifests: list[Manifest], name: str, folder: Path) -> dict[str, Any]:
    """A TOML file of a ConfigMap."""
    (text,) = [each["data"][name] for each in of_kind(manifests, "ConfigMap") if name in each["data"]]
    (folder / name).write_text(text, encoding="utf-8")
    return config.read(folder / name)


@each_overlay
def test_configurations_parse_and_name_every_shard(overlay: str, tmp_path: Path) -> None:
    manifests = rendered(overlay)
    config.parse(AggregatorConfig, table(manifests, "aggregator.toml", tmp_path), "aggregator.toml")
    coordinator = config.parse(
        CoordinatorConfig, table(manifests, "coordinator.toml", tmp_path), "coordinator.toml"
    )
    (shards,) = [s for s in of_kind(manifests, "StatefulSet") if s["metadata"]["name"] == "aggregator"]
    count, service = shards["spec"]["replicas"], shards["spec"]["serviceName"]
    assert coordinator.aggregators == tuple(f"aggregator-{i}.{service}:7071" for i in range(count))


def test_the_gateway_routes_to_every_service(tmp_path: Path) -> None:
    manifests = rendered("production")
    public = set(table(manifests, "coordinator.toml", tmp_path)["public_aggregators"])
    services = {each["metadata"]["name"]: each["spec"]["ports"] for each in of_kind(manifests, "Service")}
    (gateway,) = of_kind(manifests, "Gateway")
    (listener,) = gateway["spec"]["listeners"]
    hosts = set()
    for route in of_kind(manifests, "TLSRoute"):
        (parent,), (rule,) = route["spec"]["parentRefs"], route["spec"]["rules"]
        assert {"name": gateway["metadata"]["name"], "sectionName": listener["name"]} == parent
        (backend,) = rule["backendRefs"]
        assert backend["port"] in {port["port"] for port in services[backend["name"]]}
        (host,) = route["spec"]["hostnames"]
        assert host.endswith(listener["hostname"].removeprefix("*"))
        hosts.add(f"{host}:{listener['port']}")
    assert {"coordinator", "enrol"} == {host.partition(".")[0] for host in hosts - public}
    assert public <= hosts


def test_monitors_match_ports_and_rules() -> None:
    manifests = rendered("production")
    for monitor in of_kind(manifests, "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        wanted, services = monitor["spec"]["selector"], of_kind(manifests, "Service")
        (service,) = [each for each in services if matches(wanted, each["metadata"]["labels"])]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert f"fedel-{service['metadata']['name']}" == endpoint["relabelings"][0]["replacement"]


def test_rules_and_dashboards_are_up_to_date() -> None:
    assert rules.text() == rules.OUTPUT.read_text(encoding="utf-8"), "run `python -m k8s.rules`"
    maps = {each["metadata"]["name"]: each for each in of_kind(rendered("production"), "ConfigMap")}
    files = {
        path.name: path.read_text(encoding="utf-8") for path in (ROOT / "grafana/dashboards").glob("*.json")
    }
    assert files == maps["fedel-dashboards"]["data"]


@each_overlay
def test_images_have_this_version(overlay: str) -> None:
    images = {c["image"] for _, template in pod_templates(rendered(overlay)) for c in containers(template)}
    ours = {image for image in images if "fedel-" in image}
    assert ours
    assert all(image.endswith(f":{__version__}") for image in ours)
