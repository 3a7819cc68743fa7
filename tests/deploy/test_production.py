"""The overlay production on a real node, with PostgreSQL and agents: docs/kubernetes.md's commands as printed.

    FEDEL_KUBECTL=... FEDEL_DATABASE=FOLDER pytest -m slow -s tests/deploy/test_production.py

`node.py` says what the node must have. The namespaces fedel and fedel-edge are deleted first. Three pods with
the template of the overlay edge stand for devices; they know the public names by `hostAliases`, as there is no
gateway.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fedel import __version__
from tests.deploy.manifests import Manifest, named, rendered, write_overlay
from tests.deploy.node import (
    DATABASE,
    ROOT,
    Desk,
    Namespace,
    Run,
    Watch,
    needs_node,
    printed,
    say,
    shell,
)

HOST = "fedel.example.org"
NUM_ROUNDS = 6
SERVERS, EDGE = Namespace("fedel"), Namespace("fedel-edge")
DEVICES = ("device-0", "device-1", "device-2")
DESK = Desk(SERVERS, EDGE, "device-0", f"coordinator.{HOST}:443")
LESS = """
- {op: replace, path: /spec/template/spec/containers/0/resources/requests, value: {cpu: 50m, memory: 192Mi}}
"""
"""A patch for a node with two cores."""
pytestmark = [
    pytest.mark.slow,
    needs_node,
    pytest.mark.skipif(not DATABASE, reason="FEDEL_DATABASE names no PostgreSQL: see tests/deploy/node.py"),
]


def adapted(folder: Path) -> None:
    """Step 1: the overlay with the images of this machine, the component backup and lower requests."""
    overlay = write_overlay(folder / "k8s/overlays/production", "production+backup")
    path = overlay / "kustomization.yaml"
    table = yaml.safe_load(path.read_text(encoding="utf-8"))
    table["images"] = [{"name": "fedel-server", "newTag": __version__}]
    table["patches"].append({"target": {"kind": "StatefulSet"}, "patch": LESS})
    path.write_text(yaml.safe_dump(table), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the commands of the manual are called."""
    found = tmp_path_factory.mktemp("production")
    for name in (SERVERS.name, EDGE.name):
        shell(f"kubectl delete namespace {name} --ignore-not-found --wait")
    adapted(found)
    for name in ("database.url", "database-ca.crt"):
        shutil.copy(Path(DATABASE) / name, found)
    yield found
    if not os.environ.get("FEDEL_KEEP"):
        for name in (SERVERS.name, EDGE.name):
            shell(f"kubectl delete namespace {name}")


def devices(services: list[Manifest]) -> list[Manifest]:
    """Pods in place of devices: what the overlay edge has, without its GPU and its node."""
    manifests = rendered("edge")
    template = named(manifests, "DaemonSet", "edge-agent")["spec"]["template"]
    spec = template["spec"]
    for key in ("runtimeClassName", "nodeSelector"):
        del spec[key]
    spec["hostAliases"] = [
        {
            "ip": each["spec"]["clusterIP"],
            "hostnames": [f"{each['metadata']['name'].removeprefix('public-')}.{HOST}"],
        }
        for each in services
    ]
    name = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    index = "metadata.labels['apps.kubernetes.io/pod-index']"
    (agent,), (enrol,) = spec["containers"], spec["initContainers"]
    for each in (agent, enrol):
        each["image"] = f"fedel-agent:{__version__}"
        each["env"] = [name, *(env for env in each["env"] if env["name"] != "NODE")]
    agent["env"] += [
        {"name": "NUMBER", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "FEDEL_DATA", "value": "/var/lib/fedel/data"},
    ]
    agent["args"] += ["--set=device=cpu", "--set=data.of=3", "--set=data.index=$(NUMBER)", "--set=threads=1"]
    agent["args"] += ["--set=data.method=iid"]
    agent["resources"]["requests"] = {"cpu": "50m", "memory": "512Mi"}
    copy = ["cp", "-r", "/data/.", "/var/lib/fedel/data"]
    data = {"name": "data", "image": f"fedel-data:{__version__}", "command": copy}
    spec["initContainers"].append(data | {key: enrol[key] for key in ("volumeMounts", "resources")})
    spec["securityContext"]["fsGroup"] = spec["securityContext"]["runAsGroup"]
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "state"]
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    pods = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": "device", "namespace": EDGE.name},
        "spec": {
            "serviceName": "device",
            "replicas": len(DEVICES),
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app.kubernetes.io/name": "edge-agent"}},
            "template": template,
            "volumeClaimTemplates": [{"metadata": {"name": "state"}, "spec": claim}],
        },
    }
    return [each for each in manifests if each["kind"] != "DaemonSet"] + [pods]


def start_devices(folder: Path) -> None:
    """As *Agents on edge nodes* says, with these names."""
    _, commands = printed("Agents on edge nodes")
    token, space, *_ = commands.splitlines()
    for device in DEVICES:
        shell(token.replace("jetson-1", device), folder)
    shell(space, ROOT)
    files = " ".join(f"--from-file={device}" for device in DEVICES)
    shell(f"kubectl -n fedel-edge create secret generic fedel-enrolment {files}", folder)
    services = json.loads(SERVERS.kubectl("get services -l fedel/public -o json"))["items"]
    (folder / "devices.yaml").write_text(yaml.safe_dump_all(devices(services)), encoding="utf-8")
    shell("kubectl apply -f devices.yaml", folder)
    EDGE.kubectl("rollout status statefulset/device")


def start_operator(folder: Path) -> None:
    token = SERVERS.kubectl(
        "exec coordinator-0 -c coordinator --",
        "fedel certs token ada --role operator --authority /var/lib/fedel/ca",
    ).strip()
    EDGE.kubectl(f"exec {DESK.pod} -- fedel certs enrol {token} --at enrol.{HOST}:443 --dir /tmp/ada")
    EDGE.kubectl(f"exec -i {DESK.pod} -- sh -c 'cat >/tmp/job.toml' <docker/config/job.toml")


def back_up(folder: Path) -> str:
    """The name of a backup that is made now."""
    said = shell(printed("Backup")[0], folder)
    print(said)
    assert "sound" in said
    return said.partition("/backup/")[2].partition(":")[0]


def restore(folder: Path, backup: str) -> None:
    began = time.monotonic()
    name, commands = printed("Backup")[1].split("\n", 1)
    assert name.startswith("BACKUP=")
    shell(f"BACKUP={backup}\n{commands}", folder)
    for name in ("aggregator", "coordinator"):
        SERVERS.kubectl(f"rollout status statefulset/{name}")
    say("restored, all servers ready", time.monotonic() - began)


def test_the_manual_a_disturbed_run_and_a_restore(folder: Path) -> None:
    began = time.monotonic()
    for commands in printed("Production"):
        shell(commands, folder)
    say("production ready", time.monotonic() - began)
    start_devices(folder)
    start_operator(folder)

    undisturbed = Run(DESK, "undisturbed", NUM_ROUNDS)
    bits = undisturbed.model()
    assert not undisturbed.cut, undisturbed.cut
    disturbed = Run(DESK, "disturbed", NUM_ROUNDS)
    disturbed.wait_for_round(1)
    watch = Watch(SERVERS, 1, 1)
    SERVERS.restart("aggregator-1")
    watch.check()
    SERVERS.restart("coordinator-0")
    disturbed.wait_for_round(2)
    backup = back_up(folder)
    disturbed.wait_for_round(4)
    restore(folder, backup)
    assert bits == disturbed.model()
    rounds = disturbed.rounds()
    assert [3] * NUM_ROUNDS == [each["num_updates"] for each in rounds]
    for run in (undisturbed, disturbed):
        print(run.name, [round(each["latency_seconds"], 1) for each in run.rounds()])
