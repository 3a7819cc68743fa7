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


def taken(snapshots: str, names: list[str]) -> None:
    """Wait until every snapshot can be used. The driver may fail and try again, but not for ever."""
    ends = time.monotonic() + float(os.environ.get("WAIT_SECONDS", "1800"))
    while names:
        status = ask("GET", f"{snapshots}/{names[0]}").get("status") or {}
        if status.get("readyToUse"):
            names = names[1:]
        elif time.monotonic() > ends:
            why = (status.get("error") or {}).get("message", "is there a VolumeSnapshotClass for its driver?")
            raise SystemExit(f"{names[0]} cannot be used: {why}")
        else:
            time.sleep(float(os.environ.get("POLL_SECONDS", "5")))


def main() -> None:
    namespace, keep = (ACCOUNT / "namespace").read_text().strip(), int(os.environ.get("KEEP", "14"))
    snapshots = f"/apis/snapshot.storage.k8s.io/v1/namespaces/{namespace}/volumesnapshots"
    stamp = time.strftime("%Y%m%d-%H%M", time.gmtime())
    claims = ask("GET", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", selector=CLAIMS)["items"]
    names = [claim["metadata"]["name"] for claim in claims]
    if not names:
        raise SystemExit(f"no volume claims with {CLAIMS} in {namespace}: there is nothing to back up")
    for name in names:
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
    taken(snapshots, [f"{name}-{stamp}" for name in names])
    for name in names:
        there = ask("GET", snapshots, selector=f"{CLAIM_LABEL}={name}")["items"]
        whole = sorted(s["metadata"]["name"] for s in there if (s.get("status") or {}).get("readyToUse"))
        kept = whole[-keep:]
        for old in sorted(s["metadata"]["name"] for s in there):
            if old < kept[0]:
                ask("DELETE", f"{snapshots}/{old}")
        print(f"{name}: snapshot {stamp}, {len(kept)} kept", flush=True)


if __name__ == "__main__":
    main()
