"""Stops the database for a moment, takes a snapshot of every volume, and copies the database as it was then.

A snapshot is like the disk after a power cut, and the services recover from that. While the database stands
still no round takes a step, so all volumes belong to the same moment as it.
"""

from __future__ import annotations

import json
import os
import shutil
import ssl
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from fedel_coordinator.config import DATABASE_VARIABLE, CoordinatorConfig

from fedel.backup.making import make
from fedel.backup.places import Places

ACCOUNT = Path(os.environ.get("ACCOUNT_DIR", "/var/run/secrets/kubernetes.io/serviceaccount"))
CLAIMS = "app.kubernetes.io/name in (coordinator,aggregator)"
CLAIM_LABEL = "fedel/claim"
FOLDER = Path(os.environ.get("BACKUP_DIR", "/backup"))


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


def wait(snapshots: str, names: list[str], word: str, seconds: float) -> None:
    """Until the status of every snapshot has this word. The driver may fail and try again, but not for ever."""
    ends = time.monotonic() + seconds
    while names:
        status = ask("GET", f"{snapshots}/{names[0]}").get("status") or {}
        if status.get(word):
            names = names[1:]
        elif time.monotonic() > ends:
            why = (status.get("error") or {}).get("message", "is there a VolumeSnapshotClass for its driver?")
            raise SystemExit(f"{names[0]} has no {word} after {seconds:g} s: {why}")
        else:
            time.sleep(float(os.environ.get("POLL_SECONDS", "1")))


def take(snapshots: str, claims: list[str], stamp: str) -> None:
    """A snapshot of each claim; returns when all are cut. Copying them elsewhere may go on for long."""
    for name in claims:
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
    names = [f"{name}-{stamp}" for name in claims]
    wait(snapshots, names, "creationTime", float(os.environ.get("CUT_SECONDS", "120")))


def prune(snapshots: str, claims: list[str], keep: int) -> None:
    """Delete what is older than the newest that can be used."""
    for name in claims:
        there = ask("GET", snapshots, selector=f"{CLAIM_LABEL}={name}")["items"]
        whole = sorted(s["metadata"]["name"] for s in there if (s.get("status") or {}).get("readyToUse"))
        kept = whole[-keep:]
        for old in sorted(s["metadata"]["name"] for s in there):
            if old < kept[0]:
                ask("DELETE", f"{snapshots}/{old}")
        print(f"{name}: {len(kept)} snapshots kept", flush=True)
    for folder in sorted(FOLDER.glob("[0-9]*"))[:-keep]:
        shutil.rmtree(folder)


def main() -> None:
    namespace, keep = (ACCOUNT / "namespace").read_text().strip(), int(os.environ.get("KEEP", "14"))
    snapshots = f"/apis/snapshot.storage.k8s.io/v1/namespaces/{namespace}/volumesnapshots"
    stamp = time.strftime("%Y%m%d-%H%M", time.gmtime())
    found = ask("GET", f"/api/v1/namespaces/{namespace}/persistentvolumeclaims", selector=CLAIMS)["items"]
    claims = [claim["metadata"]["name"] for claim in found]
    if not claims:
        raise SystemExit(f"no volume claims with {CLAIMS} in {namespace}: there is nothing to back up")
    places = Places(CoordinatorConfig(database_url=os.environ[DATABASE_VARIABLE]))
    made = make(FOLDER / stamp, places, while_frozen=lambda: take(snapshots, claims, stamp))
    print(f"{stamp}: rounds waited {made.frozen_seconds:.1f} s", flush=True)
    names = [f"{name}-{stamp}" for name in claims]
    wait(snapshots, names, "readyToUse", float(os.environ.get("WAIT_SECONDS", "1800")))
    prune(snapshots, claims, keep)


if __name__ == "__main__":
    main()
