import sys
from functools import partial

import pytest

from fedel.errors import ConfigError
from fedel.simulation.on_ray import OnRay
from fedel.simulation.workers import Worker
from tests.simulation.fakes import FakeWorkload, play, run_config
from tests.strategies.fakes import fleet, same_bits

try:
    import ray  # noqa: F401
except ImportError:
    HAS_RAY = False
else:
    HAS_RAY = True


@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'fedel[ray]'")
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_same_bits():
    run = run_config("fedel", num_rounds=3, num_participants=4)
    alone = play(run, fleet(6))
    clustered = play(run, fleet(6), partial(OnRay, num_workers=2))
    assert same_bits(alone.model, clustered.model)
    assert alone.comparable() == clustered.comparable()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install 'fedel[ray]'")
@pytest.mark.filterwarnings("ignore")
def test_a_cluster_of_two_nodes_gives_the_same_bits(monkeypatch):
    from ray.cluster_utils import Cluster

    # Each node has room for one worker: two of them are on two nodes.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        run = run_config("fedel", num_rounds=3, num_participants=4)
        clustered = play(run, fleet(6), partial(OnRay, num_workers=2))
    finally:
        cluster.shutdown()
    alone = play(run, fleet(6))
    assert same_bits(alone.model, clustered.model)
    assert alone.comparable() == clustered.comparable()


def test_without_ray_the_error_says_how_to_get_it(monkeypatch):
    from fedel.strategies import FedEL

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"fedel\[ray\]"):
        OnRay(Worker(FedEL(), FakeWorkload(fleet(2))), 2)
