"""Takes a snapshot of every volume, like the disk after a power cut; the services recover from that."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path(os.environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
CLAIMS = "app.kubernetes.io/name in (coordinator,aggregator)"
CLAIM_LABEL = "fedel/claim"


def ask(method: str, path: str, body: dict[str, Any] | None = None, selector: str = "") -> dict[str, Any]:
    """One call to the API server; an error ends the job, and its status shows it."""
    server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    query = f"?labelSelector={urllib.parse.quote(selector)}" if selector else ""
    request = urllib.request.Request(server + path + query, method=method)
    request.add_header("Authorization", f"Bearer {(ACCOUNT / 'token').read_text().strip()}")
    request.add_header("Content-Type", "application/json")
    data = None if body is None else json.dumps(body).encode()
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    with urllib.request.urlopen(request, data, timeout=30, context=trusted) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def main() -> None:
    namespace, keep = (ACCOUNT / "namespace").read_text().strip(), int(os.environ.get("KEEP", "14"))
    snapshots = f"/apis/snapshot.storage.k8s.io/v1/namespaces/{namespace}/volumesnapshots"
    stamp = time.strftime("%Y%m%d-%H%M", time.gmtime())
    for claim in ask("GET", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", selector=CLAIMS)["items"]:
        name = claim["metadata"]["name"]
        ask(
            "POST",
            snapshots,
            {
                "apiVersion": "snapshot.storage.k8s.io/v1",
                "kind": "VolumeSnapshot",
                "metadata": {"name": f"{name}-{stamp}", "labels": {CLAIM_LABEL: name}},
                "spec": {"source": {"persistentVolumeClaimName": name}},
            },
        )
        there = ask("GET", snapshots, selector=f"{CLAIM_LABEL}={name}")["items"]
        taken = sorted(snapshot["metadata"]["name"] for snapshot in there)
        for old in taken[:-keep]:
            ask("DELETE", f"{snapshots}/{old}")
        print(f"{name}: snapshot {stamp}, {min(len(taken), keep)} kept", flush=True)


if __name__ == "__main__":
    main()
