"""A real cluster of one node: the commands of docs/kubernetes.md as printed, and a run that is disturbed.

    FEDEL_KUBECTL="kubectl --kubeconfig node.conf" pytest -m slow -s tests/deploy/test_cluster.py

`node.py` says what the node must have. The namespace fedel-dev is deleted first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from tests.deploy.node import KUBELET, Desk, Namespace, Run, Watch, needs_node, printed, say, shell, until

NUM_ROUNDS = 6
DEV = Namespace("fedel-dev")
DESK = Desk(DEV, DEV, "agent-0", "coordinator:7070")
pytestmark = [pytest.mark.slow, needs_node]


@pytest.fixture(scope="module")
def cluster() -> Iterator[float]:
    """The overlay as it stands, from nothing; the seconds until everything was ready."""
    shell("kubectl delete namespace fedel-dev --ignore-not-found --wait")
    start, _ = printed("Try it")
    began = time.monotonic()
    shell("\n".join(line for line in start.splitlines() if "port-forward" not in line))
    DEV.kubectl("rollout status statefulset/aggregator")
    yield time.monotonic() - began
    if not os.environ.get("FEDEL_KEEP"):
        shell("kubectl delete namespace fedel-dev")


def test_the_manual_and_a_disturbed_run(cluster: float) -> None:
    say("everything ready after kubectl apply", cluster)
    _, job = printed("Try it")
    said = shell(job)
    assert "6/6" in said, said
    assert 6 == said.count("3/3 updates")

    undisturbed = Run(DESK, "undisturbed", NUM_ROUNDS)
    bits = undisturbed.model()
    assert not undisturbed.cut
    disturbed = Run(DESK, "disturbed", NUM_ROUNDS)
    disturbed.wait_for_round(1)
    watch = Watch(DEV, 0, 2)
    DEV.restart("aggregator-0")
    watch.wait_for(1)
    DEV.restart("aggregator-0", "--grace-period=0", "--force")
    watch.check()
    disturbed.wait_for_round(2)
    DEV.roll("aggregator", "coordinator")
    disturbed.wait_for_round(3)
    DEV.restart("agent-1")
    DEV.restart("agent-2", "--grace-period=0", "--force")
    if KUBELET:
        shell(KUBELET)
        say("kubelet restarted; node ready", until(lambda: "Ready" in shell("kubectl get nodes").split()))
    assert bits == disturbed.model()
    assert KUBELET or not disturbed.cut
    rounds = disturbed.rounds()
    assert [3] * NUM_ROUNDS == [each["num_updates"] for each in rounds]
    for run in (undisturbed, disturbed):
        print(run.name, [round(each["latency_seconds"], 1) for each in run.rounds()])
