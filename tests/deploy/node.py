"""A real cluster of one node, which the environment names: its kubectl, its pods, and how long things take.

    FEDEL_KUBECTL            a command such as "kubectl --kubeconfig node.conf"
    FEDEL_RESTART_KUBELET    a command that restarts the node's kubelet; without it, that is not tried
    FEDEL_DATABASE           a folder with database.url and database-ca.crt of an empty database in a PostgreSQL
                             that pods reach over TLS; without it, production is not tried

The node must have the images and a default storage class.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KUBECTL = os.environ.get("FEDEL_KUBECTL", "")
KUBELET = os.environ.get("FEDEL_RESTART_KUBELET", "")
DATABASE = os.environ.get("FEDEL_DATABASE", "")
SECONDS = 1800.0
STOPPED_SECONDS, FOUND_SECONDS = 10.0, 5.0
JOB = {
    "rounds.min_clients": 3,
    "rounds.min_reports": 3,
    "rounds.deadline_floor_seconds": 600,
    "budget.pace": "plan",
    "workload.data_options.num_test": 500,
    "work.num_steps": 300,
}
"""Changes to docker/config/job.toml: rounds of some seconds, and the same bits every time."""

needs_node = pytest.mark.skipif(not KUBECTL, reason="FEDEL_KUBECTL names no cluster: see tests/deploy/node.py")


def _bash(script: str) -> list[str]:
    return ["bash", "-c", f'set -euo pipefail\nkubectl() {{ {KUBECTL} "$@"; }}\n{script}']


def shell(script: str, folder: Path = ROOT) -> str:
    """Commands of the manual, with the kubectl of this cluster."""
    done = subprocess.run(_bash(script), capture_output=True, text=True, cwd=folder, timeout=SECONDS)
    assert 0 == done.returncode, f"{script}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def printed(heading: str) -> list[str]:
    """The blocks of commands below a heading of the manual."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", page.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [commands for language, commands in blocks if not language]


def say(what: str, seconds: float) -> None:
    print(f"{what}: {seconds:.1f} s", flush=True)


def until(true: Callable[[], Any], limit: float = 300.0, step: float = 0.2) -> float:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < limit
        time.sleep(step)
    return time.monotonic() - began


@dataclass(frozen=True)
class Namespace:
    name: str

    def kubectl(self, *words: str) -> str:
        return shell(f"kubectl -n {self.name} {' '.join(words)}")

    def pod(self, name: str) -> dict[str, Any]:
        text = self.kubectl("get pod", name, "--ignore-not-found -o json")
        found: dict[str, Any] = json.loads(text or "{}")
        return found

    def is_ready(self, name: str, but_not: str = "") -> bool:
        found = self.pod(name)
        conditions = {c["type"]: c["status"] for c in found.get("status", {}).get("conditions", [])}
        return bool(found) and found["metadata"]["uid"] != but_not and conditions.get("Ready") == "True"

    def restart(self, name: str, *words: str, limit: float = STOPPED_SECONDS) -> None:
        """Delete a pod and wait until another is ready; how long each takes."""
        uid = self.pod(name)["metadata"]["uid"]
        began = time.monotonic()
        self.kubectl("delete pod", name, "--wait=false", *words)
        stopped = until(lambda: self.pod(name).get("metadata", {}).get("uid") != uid)
        until(lambda: self.is_ready(name, but_not=uid))
        say(f"{name} {' '.join(words)} stopped", stopped)
        say(f"{name} {' '.join(words)} ready again", time.monotonic() - began)
        assert stopped < limit

    def roll(self, *names: str) -> None:
        """A rolling restart of these StatefulSets."""
        began = time.monotonic()
        self.kubectl("rollout restart", *(f"statefulset/{name}" for name in names))
        for name in names:
            self.kubectl(f"rollout status statefulset/{name}")
        say(f"rolling restart of {' and '.join(names)}", time.monotonic() - began)


@dataclass(frozen=True)
class Desk:
    """An operator in a pod with torch, with the certificate in /tmp/ada; the coordinator is elsewhere."""

    servers: Namespace
    agents: Namespace
    pod: str
    address: str

    def operator(self, *words: str) -> str:
        reached = f"--coordinator {self.address} --certs /tmp/ada"
        return self.agents.kubectl(f"exec {self.pod} -- fedel", *words, reached)


class Run:
    """`fedel run` at a desk, in its own thread; its model at the end.

    What cuts `kubectl exec`, such as a restart of the kubelet, ends that command. The run goes on.
    """

    def __init__(self, desk: Desk, name: str, num_rounds: int) -> None:
        self.name, self._desk, self._num_rounds = name, desk, num_rounds
        self.cut = ""
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        sets = {**JOB, "rounds.num_rounds": self._num_rounds}
        words = " ".join(f"--set {key}={value}" for key, value in sets.items())
        try:
            self._desk.operator("run /tmp/job.toml --out /tmp/runs --name", self.name, words)
        except AssertionError as error:
            self.cut = str(error)

    def rounds(self) -> list[dict[str, Any]]:
        file = f"/var/lib/fedel/runs/{self.name}/rounds.jsonl"
        text = self._desk.servers.kubectl(f"exec coordinator-0 -c coordinator -- sh -c 'cat {file} || true'")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def wait_for_round(self, number: int) -> None:
        def reached() -> bool:
            assert self._thread.is_alive(), f"the run ended before it could be disturbed: {self.cut}"
            return self._desk.servers.is_ready("coordinator-0") and len(self.rounds()) >= number

        until(reached, SECONDS, step=2.0)

    def _is_over(self) -> bool:
        try:
            return self._desk.servers.is_ready("coordinator-0") and len(self.rounds()) == self._num_rounds
        except AssertionError:  # a kubelet that has just begun does not know its pods yet
            return False

    def model(self) -> str:
        """The hash of its file, once the run is over, which this waits for."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        until(self._is_over, SECONDS, step=2.0)
        self._desk.operator("runs fetch", self.name, "--out /tmp/fetched")
        file = f"/tmp/fetched/{self.name}/model.safetensors"
        return self._desk.agents.kubectl(f"exec {self._desk.pod} -- sha256sum {file}").split()[0]


class Watch:
    """How long a shard stays unknown to the coordinator after it listens again, ``num_outages`` times."""

    def __init__(self, servers: Namespace, shard: int, num_outages: int) -> None:
        script = Path(__file__).with_name("outage.py")
        words = (
            "exec -i coordinator-0 -c coordinator -- python3 -",
            f"aggregator-{shard}.aggregator:7071 {num_outages} <{script}",
        )
        self._num_outages = num_outages
        self._outages: list[dict[str, float]] = []
        self._thread = threading.Thread(
            target=self._work, args=(f"kubectl -n {servers.name} {' '.join(words)}",)
        )
        self._thread.start()

    def _work(self, script: str) -> None:
        with subprocess.Popen(_bash(script), stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
            assert process.stdout
            self._outages.extend(json.loads(line) for line in process.stdout)

    def wait_for(self, num_outages: int) -> None:
        """One outage has to end before the next begins, or they are one."""
        until(lambda: len(self._outages) >= num_outages)

    def check(self) -> None:
        self._thread.join()
        assert self._num_outages == len(self._outages), self._outages
        for outage in self._outages:
            say("the shard was away", outage["away_seconds"])
            say("the shard listened and was not found", outage["found_seconds"])
            assert outage["found_seconds"] < FOUND_SECONDS
