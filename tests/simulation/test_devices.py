from collections import Counter
from dataclasses import replace

import pytest

from fedel import config
from fedel.core.timing import budget, full_steps
from fedel.errors import ConfigError, ProfileError
from fedel.simulation import devices
from fedel.simulation.conditions import Network
from fedel.simulation.devices import FleetConfig
from fedel.testing import memory_use
from fedel.training.profile_io import save_profile
from tests.strategies import fakes


def build(table, num_clients, network=None, seed=1):
    fleet = config.parse(FleetConfig, table, "job.toml: [fleet]")
    sizes = list(range(10, 10 + num_clients))
    return devices.build(fleet, fakes.profile(), fakes.spec(), sizes, network or Network(), seed)


def test_counts_are_assigned_in_order():
    clients = build({"counts": {"orin": 2, "xavier": 1}}, 3)
    assert ["orin", "orin", "xavier"] == [client.device for client in clients]
    assert ["client-0", "client-1", "client-2"] == [client.name for client in clients]
    assert [10, 11, 12] == [client.num_samples for client in clients]


def test_random_types_are_even_and_stay_with_their_client():
    kinds = Counter(client.device for client in build({}, 400))
    assert {"orin", "orin/2", "orin/3", "orin/4"} == kinds.keys()
    assert 70 < min(kinds.values()) <= max(kinds.values()) < 130
    few, many = build({}, 100), build({}, 100)
    assert [c.device for c in few] == [c.device for c in many]
    assert [c.device for c in few] != [c.device for c in build({}, 100, seed=2)]


def test_limit_of_memory(tmp_path):
    use = memory_use(fakes.spec())
    save_profile(replace(fakes.profile(), memory=use), tmp_path / "pi.json")
    pi = {"profile": str(tmp_path / "pi.json"), "slowness": 2, "memory_mb": 5}
    small, other = build({"counts": {"pi": 1, "orin": 1}, "types": {"pi": pi}}, 2)
    assert replace(use, limit_bytes=5 * 10**6) == small.profile.memory
    assert 0 == other.profile.memory_limit_bytes
    with pytest.raises(ConfigError, match="says nothing about memory"):
        build({"counts": {"pi": 1}, "types": {"pi": {"memory_mb": 5}}}, 1)


def test_slowness_scales_every_tensor():
    orin, third = build({"counts": {"orin": 1, "orin/3": 1}}, 2)
    for fast, slow in zip(orin.profile.tensors, third.profile.tensors, strict=True):
        assert (3 * fast.grad_seconds, 3 * fast.update_seconds) == (slow.grad_seconds, slow.update_seconds)
    assert pytest.approx(3 * budget(full_steps([orin.profile]))) == budget(full_steps([third.profile]))
    assert "orin/3" == third.profile.device


def test_a_type_may_have_its_own_profile(tmp_path):
    own = fakes.profile()
    times = tuple(replace(t, update_seconds=t.update_seconds * (9 if t.block == 1 else 1)) for t in own.tensors)
    save_profile(replace(own, tensors=times), tmp_path / "pi.json")
    table = {
        "counts": {"orin": 1, "pi": 1},
        "types": {"pi": {"profile": str(tmp_path / "pi.json"), "slowness": 2}},
    }
    orin, pi = build(table, 2)
    ratios = {
        t.block: pytest.approx(p.update_seconds / t.update_seconds)
        for t, p in zip(orin.profile.tensors, pi.profile.tensors, strict=True)
    }
    assert {1: 18.0, 2: 2.0, 3: 2.0, 4: 2.0, 5: 2.0, 6: 2.0} == ratios


def test_a_profile_of_another_model_is_refused(tmp_path):
    save_profile(fakes.profile(of=fakes.frozen_spec()), tmp_path / "other.json")
    with pytest.raises(ProfileError, match=r"other\.json is of another model"):
        build({"counts": {"x": 1}, "types": {"x": {"profile": str(tmp_path / "other.json")}}}, 1)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"counts": {"orinn": 1}}, "unknown device type 'orinn'; did you mean 'orin'"),
        ({"random": []}, "at least one type"),
        ({"types": {"pi": {"slowness": 0}}}, "slowness = 0"),
        ({"types": {"pi": {"memory_mb": -1}}}, "memory_mb = -1"),
        ({"cuonts": {}}, "did you mean 'counts'"),
    ],
)
def test_mistakes_are_named(table, words):
    with pytest.raises(ConfigError, match=words):
        build(table, 1)


def test_a_link_of_an_unknown_type_is_a_mistake():
    network = config.parse(Network, {"devices": {"xavir": {}}}, "[network]")
    with pytest.raises(ConfigError, match="did you mean 'xavier'"):
        build({"counts": {"orin": 1, "xavier": 1}}, 2, network)
