"""A real cluster of one node: the commands of docs/kubernetes.md as printed, and a run that is disturbed.

    FEDEL_KUBECTL="kubectl --kubeconfig node.conf" pytest -m slow -s tests/deploy/test_cluster.py

The node must have the images and a default storage class; the namespace fedel-dev is deleted first. With
FEDEL_RESTART_KUBELET, a command that restarts the node's kubelet, that is tried too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KUBECTL = os.environ.get("FEDEL_KUBECTL", "")
KUBELET = os.environ.get("FEDEL_RESTART_KUBELET", "")
SECONDS = 1800.0
STOPPED_SECONDS, FOUND_SECONDS = 10.0, 5.0
NUM_ROUNDS = 6
JOB = {
    "rounds.min_clients": 3,
    "rounds.min_reports": 3,
    "rounds.num_rounds": NUM_ROUNDS,
    "rounds.deadline_floor_seconds": 600,
    "budget.pace": "plan",
    "workload.data_options.num_train": 6000,
    "workload.data_options.num_test": 500,
    "work.num_steps": 10,
}
"""Changes to docker/config/job.toml: less work, and the same bits every time."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not KUBECTL, reason="FEDEL_KUBECTL names no cluster: see the top of this file"),
]


def shell(script: str) -> str:
    """Commands of the manual, with the kubectl of this cluster."""
    text = f'set -euo pipefail\nkubectl() {{ {KUBECTL} "$@"; }}\n{script}'
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, cwd=ROOT, timeout=SECONDS)
    assert 0 == done.returncode, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def kubectl(*words: str) -> str:
    return shell("kubectl -n fedel-dev " + " ".join(words))


def printed(heading: str) -> list[str]:
    """The blocks of commands below a heading of the manual."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    return re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def say(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s", flush=True)


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("get", "pod", name, "--ignore-not-found", "-o", "json") or "{}")
    return found


def until(true: Callable[[], Any], limit: float = 300.0) -> float:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < limit
        time.sleep(0.1)
    return time.monotonic() - began


def is_ready(name: str, but_not: str = "") -> bool:
    found = pod(name)
    conditions = {c["type"]: c["status"] for c in found.get("status", {}).get("conditions", [])}
    return bool(found) and found["metadata"]["uid"] != but_not and conditions.get("Ready") == "True"


@pytest.fixture(scope="module")
def cluster() -> Iterator[float]:
    """The overlay as it stands, from nothing; the seconds until everything was ready."""
    shell("kubectl delete namespace fedel-dev --ignore-not-found --wait")
    start, _ = printed("Try it")
    began = time.monotonic()
    shell("\n".join(line for line in start.splitlines() if "port-forward" not in line))
    kubectl("rollout status statefulset/aggregator")
    yield time.monotonic() - began
    if not os.environ.get("FEDEL_KEEP"):
        shell("kubectl delete namespace fedel-dev")


class Run:
    """`fedel run` in the pod agent-0, in its own thread; its model at the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        sets = " ".join(f"--set {key}={value}" for key, value in JOB.items())
        kubectl(
            "exec agent-0 -- fedel run /tmp/job.toml --coordinator coordinator:7070 --certs /tmp/ada",
            f"--out /tmp/runs --name {self.name} {sets}",
        )

    def rounds(self) -> list[dict[str, Any]]:
        text = kubectl(
            f"exec coordinator-0 -- sh -c 'cat /var/lib/fedel/runs/{self.name}/rounds.jsonl || true'"
        )
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def wait_for_round(self, number: int) -> None:
        def reached() -> bool:
            assert self._thread.is_alive(), "the run ended before it could be disturbed"
            return is_ready("coordinator-0") and len(self.rounds()) >= number

        until(reached, SECONDS)

    def model(self) -> str:
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        return kubectl(f"exec agent-0 -- sha256sum /tmp/runs/{self.name}/model.safetensors").split()[0]


class Watch:
    """How long shard 0 stays unknown to the coordinator after it listens again."""

    def __init__(self, seconds: float) -> None:
        script = Path(__file__).with_name("outage.py")
        words = f"exec -i coordinator-0 -- python3 - aggregator-0.aggregator:7071 {seconds} <{script}"
        self._text = ""
        self._thread = threading.Thread(target=self._work, args=(words,))
        self._thread.start()

    def _work(self, words: str) -> None:
        self._text = kubectl(words)

    def outages(self) -> list[dict[str, float]]:
        self._thread.join()
        return [json.loads(line) for line in self._text.splitlines()]


def restart(name: str, *words: str, limit: float = STOPPED_SECONDS) -> None:
    """Delete a pod and wait until another is ready; how long each takes."""
    uid = pod(name)["metadata"]["uid"]
    began = time.monotonic()
    kubectl("delete pod", name, "--wait=false", *words)
    stopped = until(lambda: pod(name).get("metadata", {}).get("uid") != uid)
    until(lambda: is_ready(name, but_not=uid))
    say(f"{name} {' '.join(words)} stopped", stopped)
    say(f"{name} {' '.join(words)} ready again", time.monotonic() - began)
    assert stopped < limit


def test_the_manual_and_a_disturbed_run(cluster: float) -> None:
    say("everything ready after kubectl apply", cluster)
    _, job = printed("Try it")
    said = shell(job)
    assert "finished" in said, said

    undisturbed = Run("undisturbed")
    bits = undisturbed.model()
    disturbed = Run("disturbed")
    disturbed.wait_for_round(1)
    watch = Watch(90)
    restart("aggregator-0")
    restart("aggregator-0", "--grace-period=0", "--force")
    (first, second) = watch.outages()
    for outage in (first, second):
        say("the shard was away", outage["away_seconds"])
        say("the shard listened and was not found", outage["found_seconds"])
        assert outage["found_seconds"] < FOUND_SECONDS
    disturbed.wait_for_round(2)
    began = time.monotonic()
    kubectl("rollout restart statefulset/aggregator statefulset/coordinator")
    kubectl("rollout status statefulset/aggregator")
    kubectl("rollout status statefulset/coordinator")
    say("rolling restart of both servers", time.monotonic() - began)
    disturbed.wait_for_round(3)
    restart("agent-1")
    restart("agent-2", "--grace-period=0", "--force")
    if KUBELET:
        shell(KUBELET)
        say("kubelet restarted; node ready", until(lambda: "Ready" in shell("kubectl get nodes").split()))
    assert bits == disturbed.model()
    rounds = disturbed.rounds()
    assert [3] * NUM_ROUNDS == [each["num_updates"] for each in rounds]
    for run in (undisturbed, disturbed):
        print(run.name, [round(each["latency_seconds"], 1) for each in run.rounds()])
