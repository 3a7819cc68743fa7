"""What every pod must keep to: no root, no privileges, limits, probes, a read-only root file system."""

from __future__ import annotations

from collections.abc import Iterator

from tests.deploy.manifests import Manifest, containers

TALKS_TO_THE_API = "backup"
"""The service account of the component backup-snapshots."""
USES_ITS_NODE = {"edge-agent"}
"""Its state and data are on the device."""
RESOURCES = ("cpu", "memory")


def complaints(name: str, template: Manifest, runs_for_ever: bool = True) -> Iterator[str]:
    """Everything about a pod that breaks the policy, a sentence each."""
    spec = template["spec"]
    yield from (f"{name}: {complaint}" for complaint in _pod(name, spec))
    for container in containers(template):
        yield from (f"{name}/{container['name']}: {complaint}" for complaint in _container(container))
    if runs_for_ever:
        for container in spec["containers"]:
            for probe in ("readinessProbe", "livenessProbe"):
                if probe not in container:
                    yield f"{name}/{container['name']}: no {probe}"


def _pod(name: str, spec: Manifest) -> Iterator[str]:
    security = spec.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("runAsUser", 0) < 10000:
        yield "may run as root, or as a user of the host"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    if any(spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
        yield "shares a namespace of the host"
    if security.get("fsGroup") and security.get("fsGroupChangePolicy") != "OnRootMismatch":
        yield "every start changes the modes of files, and others can read keys"
    if name not in USES_ITS_NODE and any("hostPath" in volume for volume in spec.get("volumes", [])):
        yield "mounts a path of the host"
    has_token = spec.get("automountServiceAccountToken") is not False
    if has_token and spec.get("serviceAccountName") != TALKS_TO_THE_API:
        yield "has a token of the Kubernetes API"


def _container(container: Manifest) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("readOnlyRootFilesystem") is not True:
        yield "root file system can be written"
    if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
        yield "may gain privileges"
    if security.get("capabilities") != {"drop": ["ALL"]}:
        yield "has capabilities"
    for kind in ("requests", "limits"):
        missing = [r for r in RESOURCES if r not in container.get("resources", {}).get(kind, {})]
        if missing:
            yield f"no {kind} of {', '.join(missing)}"
    tag = container["image"].rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest"):
        yield f"image {container['image']} names no version"
    for variable in container.get("env", []):
        secret = any(word in variable["name"] for word in ("PASSWORD", "TOKEN", "URL"))
        if secret and "secretKeyRef" not in variable.get("valueFrom", {}):
            yield f"{variable['name']} does not come from a secret"
