"""The script of the component backup, as its container runs it: a backup of every volume, and back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fedel_coordinator.sql import SqlStore

from fedel.backup import manifest
from fedel.security.authority import Authority
from tests.backup.test_files import fill, write_run
from tests.deploy.manifests import EVERYTHING, container, needs_kubectl, of_kind, pod_templates, rendered

pytestmark = needs_kubectl
NUM_SHARDS = 3
PLACES = ("/var/lib/fedel", "/shards", "/backup", "/etc/fedel-aggregator", "/etc/fedel", "/tmp")


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    """A folder that stands for the root of the container, with what the volumes hold."""
    manifests = rendered(EVERYTHING)
    mounted = container(dict(pod_templates(manifests))["backup"], "backup")["volumeMounts"]
    for mount in mounted:
        (tmp_path / mount["mountPath"].strip("/")).mkdir(parents=True)
    assert NUM_SHARDS == len(list((tmp_path / "shards").iterdir()))
    for name, folder in (("coordinator", "etc/fedel"), ("aggregator", "etc/fedel-aggregator")):
        (text,) = (
            m["data"][f"{name}.toml"] for m in of_kind(manifests, "ConfigMap") if f"{name}.toml" in m["data"]
        )
        (tmp_path / folder / f"{name}.toml").write_text(here(text, tmp_path), encoding="utf-8")
    Authority.create(tmp_path / "var/lib/fedel/ca")
    store = SqlStore(url(tmp_path))
    fill(store)
    store.close()
    for shard in range(NUM_SHARDS):
        write_run(tmp_path / f"shards/{shard}/aggregator", "night-1", 3)
    return tmp_path


def url(pod: Path) -> str:
    return f"sqlite:///{pod / 'database.db'}"


def here(text: str, pod: Path) -> str:
    """The text with the container's paths below this folder."""
    for place in PLACES:
        text = text.replace(place, f"\0{place[1:]}")
    return text.replace("\0", f"{pod}/")


def run(pod: Path, **settings: str) -> str:
    job = container(dict(pod_templates(rendered(EVERYTHING)))["backup"], "backup")
    surroundings = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FEDEL_DATABASE_URL": url(pod),
        "KEEP": "2",
        **settings,
    }
    command = [*job["command"], here(job["args"][0], pod)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    return done.stdout


def test_a_backup_comes_back_to_empty_volumes(pod: Path) -> None:
    for old in ("20260101-031700", "20260102-031700"):
        (pod / "backup" / old).mkdir()
    said = run(pod)
    assert (
        "night-1: running, database at round 3, aggregator-0 at 3, aggregator-1 at 3, aggregator-2 at 3" in said
    )
    old, new = sorted((pod / "backup").iterdir())
    assert "20260102-031700" == old.name, "the oldest went"
    assert {"authority", "database.sqlite", *(f"aggregator-{i}" for i in range(NUM_SHARDS))} == set(
        manifest.read(new).parts
    )

    key = (pod / "var/lib/fedel/ca/ca.key").read_bytes()
    for place in ("var/lib/fedel", *(f"shards/{i}" for i in range(NUM_SHARDS))):
        shutil.rmtree(pod / place)
        (pod / place).mkdir()
    (pod / "database.db").unlink()
    assert "restored" in run(pod, RESTORE=new.name)
    assert key == (pod / "var/lib/fedel/ca/ca.key").read_bytes()
    for shard in range(NUM_SHARDS):
        assert (pod / f"shards/{shard}/aggregator/runs/night-1/versions/000003.json").read_text() == "night-1 3"
    store = SqlStore(url(pod))
    assert ["night-1", "old"] == sorted(run.name for run in store.runs())
    store.close()
