"""Every overlay renders, fits the schemas strictly, keeps the policy, and refers to what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.config import CoordinatorConfig
from fedel_edge.config import AgentConfig

from fedel import __version__, config
from k8s import public, rules
from tests.deploy.manifests import (
    EVERYTHING,
    OVERLAYS,
    ROOT,
    Manifest,
    arguments,
    container,
    containers,
    matches,
    named,
    names,
    needs_kubectl,
    of_kind,
    pod_templates,
    rendered,
)
from tests.deploy.policy import complaints

OF_OTHERS = ("monitoring.coreos.com/", "gateway.networking.k8s.io/", "traefik.io/")
"""Custom resources, whose schemas do not come with Kubernetes."""
pytestmark = needs_kubectl
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@each_overlay
def test_fits_the_schemas_of_kubernetes(overlay: str) -> None:
    checked = [each for each in rendered(overlay) if not each["apiVersion"].startswith(OF_OTHERS)]
    assert len(checked) > 4
    for manifest in checked:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_a_wrong_key_is_found() -> None:
    manifest = of_kind(rendered("dev"), "StatefulSet")[0]
    manifest["spec"]["template"]["spec"]["containers"][0]["redinessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("overlay", ["dev", "edge", "production"])
def test_an_overlay_needs_nothing_that_kubernetes_does_not_have(overlay: str) -> None:
    assert not [each["kind"] for each in rendered(overlay) if each["apiVersion"].startswith(OF_OTHERS)]


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
        (lambda spec: spec["securityContext"].pop("fsGroupChangePolicy"), "modes of files"),
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


def claims(manifests: list[Manifest]) -> set[str]:
    """Also those that a StatefulSet makes, one for each pod."""
    found = names(manifests, "PersistentVolumeClaim")
    for each in of_kind(manifests, "StatefulSet"):
        for claim in each["spec"].get("volumeClaimTemplates", []):
            stem = f"{claim['metadata']['name']}-{each['metadata']['name']}"
            found |= {f"{stem}-{index}" for index in range(each["spec"]["replicas"])}
    return found


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
                assert volume["persistentVolumeClaim"]["claimName"] in claims(manifests)
            if "secret" in volume:
                assert f"`{volume['secret']['secretName']}`" in page, (
                    "a secret that the manual does not mention"
                )
        for each in containers(template):
            for variable in each.get("env", []):
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


def table(manifests: list[Manifest], name: str, folder: Path, container: Manifest) -> dict[str, Any]:
    """A TOML file of a ConfigMap, with what the container's arguments set."""
    (text,) = [each["data"][name] for each in of_kind(manifests, "ConfigMap") if name in each["data"]]
    (folder / name).write_text(text, encoding="utf-8")
    settings = [word.removeprefix("--set=") for word in arguments(container) if word.startswith("--set=")]
    return config.read(folder / name, settings)


def coordinator_of(manifests: list[Manifest], folder: Path) -> CoordinatorConfig:
    template = named(manifests, "StatefulSet", "coordinator")["spec"]["template"]
    found = table(manifests, "coordinator.toml", folder, container(template, "coordinator"))
    return config.parse(CoordinatorConfig, found, "coordinator.toml")


@pytest.mark.parametrize("overlay", [each for each in OVERLAYS if each != "edge"])
def test_configurations_parse_and_name_every_shard(overlay: str, tmp_path: Path) -> None:
    manifests = rendered(overlay)
    shards = named(manifests, "StatefulSet", "aggregator")
    of_aggregator = container(shards["spec"]["template"], "aggregator")
    found = table(manifests, "aggregator.toml", tmp_path, of_aggregator)
    config.parse(AggregatorConfig, found, "aggregator.toml")
    count, service = shards["spec"]["replicas"], shards["spec"]["serviceName"]
    expected = tuple(f"aggregator-{i}.{service}:7071" for i in range(count))
    assert expected == coordinator_of(manifests, tmp_path).aggregators


@pytest.mark.parametrize(("overlay", "kind"), [("dev", "StatefulSet"), ("edge", "DaemonSet")])
def test_configurations_of_agents_parse(overlay: str, kind: str, tmp_path: Path) -> None:
    manifests = rendered(overlay)
    (found,) = [each for each in of_kind(manifests, kind) if "agent" in each["metadata"]["name"]]
    agent = container(found["spec"]["template"], "agent")
    values = table(manifests, "agent.toml", tmp_path, agent)
    values.get("data", {}).pop("index", None)  # the number of the pod, which only the cluster knows
    parsed = config.parse(AgentConfig, values, "agent.toml")
    hosts = {"dev": "coordinator:7070", "edge": "coordinator.fedel.example.org:443"}
    assert hosts[overlay] == parsed.coordinator


def test_monitors_match_ports_and_rules() -> None:
    manifests = rendered(EVERYTHING)
    for monitor in of_kind(manifests, "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        wanted, services = monitor["spec"]["selector"], of_kind(manifests, "Service")
        (service,) = [each for each in services if matches(wanted, each["metadata"]["labels"])]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert f"fedel-{service['metadata']['name']}" == endpoint["relabelings"][0]["replacement"]


def test_generated_files_are_up_to_date() -> None:
    assert rules.text() == rules.OUTPUT.read_text(encoding="utf-8"), "run `python -m k8s.rules`"
    for path, text in public.files().items():
        assert text == path.read_text(encoding="utf-8"), "run `python -m k8s.public`"
    maps = {each["metadata"]["name"]: each for each in of_kind(rendered(EVERYTHING), "ConfigMap")}
    files = {
        path.name: path.read_text(encoding="utf-8") for path in (ROOT / "grafana/dashboards").glob("*.json")
    }
    assert files == maps["fedel-dashboards"]["data"]


@each_overlay
def test_images_have_this_version(overlay: str) -> None:
    images = {c["image"] for _, template in pod_templates(rendered(overlay)) for c in containers(template)}
    ours = {image for image in images if "fedel-" in image}
    assert ours
    assert all(image.endswith((f":{__version__}", f":{__version__}-jetson")) for image in ours)
