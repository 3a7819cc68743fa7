"""What the components of k8s/ add: routes to every public name, a login, a backup, one place for settings."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from k8s import public
from tests.deploy.manifests import (
    EVERYTHING,
    EXPOSED,
    ROOT,
    Manifest,
    arguments,
    container,
    containers,
    environment,
    kustomize,
    named,
    needs_kubectl,
    of_kind,
    pod_templates,
    rendered,
    write_overlay,
)
from tests.deploy.test_kubernetes import coordinator_of

pytestmark = needs_kubectl


def exposed(manifests: list[Manifest]) -> dict[str, str]:
    """Public name -> service, as the objects of one component say."""
    found: dict[str, str] = {}
    for route in of_kind(manifests, "TLSRoute"):
        (host,), (rule,) = route["spec"]["hostnames"], route["spec"]["rules"]
        (backend,) = rule["backendRefs"]
        assert 443 == backend["port"]
        found[host] = backend["name"]
    for ingress in of_kind(manifests, "Ingress"):
        for rule in ingress["spec"]["rules"]:
            (path,) = rule["http"]["paths"]
            found[rule["host"]] = path["backend"]["service"]["name"]
    for route in of_kind(manifests, "IngressRouteTCP"):
        assert route["spec"]["tls"] == {"passthrough": True}
        for each in route["spec"]["routes"]:
            (host,) = re.fullmatch(r"HostSNI\(`(.*)\.`\)", each["match"]).groups()  # type: ignore[union-attr]
            found[host] = each["services"][0]["name"]
    for service in of_kind(manifests, "Service"):
        if service["spec"].get("type") == "LoadBalancer":
            annotations = service["metadata"]["annotations"]
            found[annotations["external-dns.alpha.kubernetes.io/hostname"]] = service["metadata"]["name"]
    found.pop("page.fl.example.net", None)
    return found


@pytest.mark.parametrize("component", EXPOSED)
def test_host_and_shards_are_set_in_one_place(component: str, tmp_path: Path) -> None:
    """As docs/kubernetes.md says: change settings.yaml, then write what exists once for each shard."""
    k8s = tmp_path / "k8s"
    shutil.copytree(ROOT / "k8s", k8s)
    shutil.copytree(ROOT / "grafana", tmp_path / "grafana")
    overlay = k8s / "overlays" / "production"
    table = yaml.safe_load((overlay / "settings.yaml").read_text())
    table["data"] |= {"host": "fl.example.net", "shards": "5", "database-network": "192.0.2.0/24"}
    (overlay / "settings.yaml").write_text(yaml.safe_dump(table))
    text = (overlay / "kustomization.yaml").read_text()
    (overlay / "kustomization.yaml").write_text(
        text.replace(f"  # - ../../components/{component} ", f"  - ../../components/{component} ")
    )
    for path, content in public.files(overlay).items():
        target = k8s / path.relative_to(public.K8S) if path.is_relative_to(public.K8S) else path
        target.write_text(content)
    manifests = list(yaml.safe_load_all(kustomize(overlay)))

    wanted = ["coordinator", "enrol", *(f"aggregator-{shard}" for shard in range(5))]
    assert {f"{name}.fl.example.net": f"public-{name}" for name in wanted} == exposed(manifests)
    coordinator = coordinator_of(manifests, tmp_path)
    assert tuple(f"aggregator-{i}.fl.example.net:443" for i in range(5)) == coordinator.public_aggregators
    assert (
        5 == named(manifests, "StatefulSet", "aggregator")["spec"]["replicas"] == len(coordinator.aggregators)
    )
    (patch,) = yaml.safe_load_all((k8s / "components/backup/shards.patch.yaml").read_text())
    volumes = patch["spec"]["jobTemplate"]["spec"]["template"]["spec"]["volumes"]
    claims = [each["persistentVolumeClaim"]["claimName"] for each in volumes]
    assert [f"state-aggregator-{i}" for i in range(5)] == claims
    text = yaml.safe_dump_all(manifests)
    assert "192.0.2.0/24" in text
    assert not re.search(r"\bHOST\b|fedel\.example\.org|from settings", text)


def test_routes_have_the_version_that_the_gateway_knows() -> None:
    versions = {
        each: {r["apiVersion"] for r in of_kind(rendered(each), "TLSRoute")}
        for each in (EVERYTHING, "production+gateway-v1alpha2")
    }
    assert [{"gateway.networking.k8s.io/v1"}, {"gateway.networking.k8s.io/v1alpha2"}] == list(versions.values())
    (gateway,) = of_kind(rendered(EVERYTHING), "Gateway")
    (listener,) = gateway["spec"]["listeners"]
    assert ("*.fedel.example.org", 443, "eg") == (
        listener["hostname"],
        listener["port"],
        gateway["spec"]["gatewayClassName"],
    )
    for route in of_kind(rendered(EVERYTHING), "TLSRoute"):
        assert [{"name": gateway["metadata"]["name"], "sectionName": listener["name"]}] == route["spec"][
            "parentRefs"
        ]


def test_the_certificate_of_the_coordinator_has_its_public_names() -> None:
    template = named(rendered("production"), "StatefulSet", "coordinator")["spec"]["template"]
    certs = container(template, "certs")
    assert "fedel.example.org" == environment(certs)["FEDEL_HOST"]
    assert '--host "coordinator.$FEDEL_HOST" --host "enrol.$FEDEL_HOST"' in certs["args"][0]


def test_the_login_is_the_only_way_from_outside_to_the_page(tmp_path: Path) -> None:
    manifests = rendered(EVERYTHING)
    proxy = container(named(manifests, "Deployment", "login")["spec"]["template"], "oauth2-proxy")
    words = arguments(proxy)
    assert "--redirect-url=https://page.fedel.example.org/oauth2/callback" in words
    assert "--upstream=http://coordinator:7080/" in words
    assert "--pass-host-header=false" in words
    assert "coordinator" in coordinator_of(manifests, tmp_path).http_hosts
    ingress = named(manifests, "Ingress", "login")["spec"]
    assert "page.fedel.example.org" == ingress["rules"][0]["host"] == ingress["tls"][0]["hosts"][0]
    assert not any("7080" in str(each) for each in of_kind(manifests, "TLSRoute", "Gateway"))


def test_every_container_that_signs_can_read_your_own_authority() -> None:
    template = named(rendered(EVERYTHING), "StatefulSet", "coordinator")["spec"]["template"]
    assert ["certs", "renew"] == [each["name"] for each in template["spec"]["initContainers"]]
    for each in containers(template):
        assert "/authority" in [mount["mountPath"] for mount in each["volumeMounts"]], each["name"]
    assert "/authority" == environment(container(template, "certs"))["AUTHORITY"]
    backup = container(dict(pod_templates(rendered(EVERYTHING)))["backup"], "backup")
    assert "/authority" in [mount["mountPath"] for mount in backup["volumeMounts"]], "it follows the link"
    plain = named(rendered("production"), "StatefulSet", "coordinator")["spec"]["template"]
    assert "AUTHORITY" not in environment(container(plain, "certs"))


@pytest.mark.parametrize("pod", ["coordinator", "aggregator"])
def test_the_container_that_renews_stops_at_once(pod: str) -> None:
    """As the first process of its container, which gets no signal that it does not ask for."""
    template = named(rendered("production"), "StatefulSet", pod)["spec"]["template"]
    renew = container(template, "renew")
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", *renew["command"], *renew["args"]]
    process = subprocess.Popen(command)
    try:
        first = _child(process.pid)
        _until_it_sleeps(first)
        first_gone = time.monotonic()
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(first)], check=True)
        process.wait(5)
        assert time.monotonic() - first_gone < 5
    finally:
        process.kill()
        subprocess.run(["kill", "-9", str(first)], check=False, capture_output=True)


def _child(pid: int) -> int:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := path.read_text().split()):
        time.sleep(0.01)
    return int(found[0])


def _until_it_sleeps(pid: int) -> None:
    while not any(
        "sleep" in Path(f"/proc/{child}/comm").read_text()
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ):
        time.sleep(0.01)


def test_an_overlay_can_be_kept_outside_the_repository(tmp_path: Path) -> None:
    folder = write_overlay(tmp_path, "production+gateway", host="a.example.net")
    assert "coordinator.a.example.net" in kustomize(folder)
