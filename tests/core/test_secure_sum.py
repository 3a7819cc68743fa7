"""Secure sums equal plain sums bit for bit, also if clients drop out at any step; else the round is lost."""

import copy
import secrets
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedel.core.secret_sharing import PRIME, join, split
from fedel.core.secure_server import SecureServer
from fedel.core.secure_sum import (
    KEYS_BYTES,
    MIN_LEFT,
    SEALED_BYTES,
    Keys,
    Reveal,
    SecureClient,
    groups_of,
    threshold_of,
)
from fedel.errors import UpdateRefused

TENSORS = {"a": 3, "b": 1, "c": 40}


def words(values):
    return np.array(values, np.uint64)


def play(vectors, no_shares=(), no_name=(), no_tensors=(), no_reveal=()):
    """A round; each client may leave before one of the steps."""
    clients = {name: SecureClient(name, "round 7", secrets.token_bytes) for name in vectors}
    roster = {name: client.keys for name, client in clients.items()}
    sharing = vectors.keys() - set(no_shares)
    sent = {name: clients[name].share(roster) for name in sharing}
    for name in sharing:
        clients[name].receive({sender: sent[sender][name] for sender in sharing - {name}})
    naming = sharing - set(no_name)
    groups = groups_of({name: vectors[name].keys() for name in naming})
    server = SecureServer("round 7", roster, groups)
    sending = naming - set(no_tensors)
    masked = {}
    for name in sending:
        masked[name] = clients[name].mask(vectors[name], groups)
        if masked[name]:
            server.add(name, masked[name])
    reveals = {name: clients[name].reveal(server.came) for name in sending - set(no_reveal)} if groups else {}
    return server.unmask(reveals), groups, server.came, masked


def plain(vectors, groups, came):
    sums = {}
    for tensor, group in groups.items():
        members = [vectors[name][tensor] for name in group if name in came]
        if members:
            sums[tensor] = np.sum(members, axis=0, dtype=np.uint64)
    return sums


def same(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def vectors_for(num_clients, seed=0, tensors=TENSORS):
    rng = np.random.default_rng(seed)
    return {
        f"client-{n}": {t: rng.integers(0, 2**64, size, np.uint64) for t, size in tensors.items()}
        for n in range(num_clients)
    }


def test_everyone_stays():
    vectors = vectors_for(5)
    sums, groups, came, _ = play(vectors)
    assert TENSORS.keys() == sums.keys()
    assert same(plain(vectors, groups, came), sums)


@pytest.mark.parametrize("step", ["no_shares", "no_name", "no_tensors", "no_reveal"])
def test_a_client_leaves_before_a_step(step):
    vectors = vectors_for(6)
    sums, groups, came, _ = play(vectors, **{step: ["client-2"]})
    assert ("client-2" in came) == (step == "no_reveal")
    assert same(plain(vectors, groups, came), sums)


NAMES = [f"client-{n}" for n in range(9)]
some = st.sets(st.sampled_from(NAMES), max_size=2)


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 9), st.data(), some, some, some, some)
def test_different_tensors_and_drop_outs_at_every_step(num, data, no_shares, no_name, no_tensors, no_reveal):
    everything = vectors_for(num)
    vectors = {
        name: {t: v for t, v in mine.items() if t in data.draw(st.sets(st.sampled_from(sorted(TENSORS))))}
        for name, mine in everything.items()
    }
    try:
        sums, groups, came, _ = play(vectors, no_shares, no_name, no_tensors, no_reveal)
    except UpdateRefused as error:
        assert "secure" == error.reason  # noqa: PT017
        gone = no_shares | no_name | no_tensors
        left = vectors.keys() - gone
        groups = groups_of({n: vectors[n].keys() for n in vectors.keys() - no_shares - no_name})
        too_few = len(left - no_reveal) < threshold_of(num)
        alone = any(0 < len(set(group) & left) < MIN_LEFT for group in groups.values())
        assert too_few or alone
    else:
        assert same(plain(vectors, groups, came), sums)


def test_a_tensor_of_few_is_not_sent():
    vectors = vectors_for(4)
    for name in ("client-2", "client-3"):
        del vectors[name]["b"]
    sums, groups, _, masked = play(vectors)
    assert {"a", "c"} == sums.keys() == groups.keys()
    assert all("b" not in sent for sent in masked.values())


def test_what_the_server_sees_says_nothing():
    """The same tensor masked twice, or by two clients, has nothing in common; nor has it with the tensor."""
    zeros = {f"client-{n}": {"c": words([0] * 4000)} for n in range(4)}
    (_, _, _, one), (_, _, _, two) = play(zeros), play(zeros)
    seen = [sent["c"] for masked in (one, two) for sent in masked.values()]
    for left in range(len(seen)):
        bits = np.unpackbits(seen[left].view(np.uint8)).mean()
        assert abs(bits - 0.5) < 0.01
        assert not any((seen[left] == seen[right]).any() for right in range(left))
    # Without one of them, or with the masks of pairs alone, the sum is still noise.
    assert abs(np.unpackbits(sum(seen[:3]).view(np.uint8)).mean() - 0.5) < 0.01
    assert abs(np.unpackbits(sum(seen[:4]).view(np.uint8)).mean() - 0.5) < 0.01


def started(num=4):
    clients = {f"client-{n}": SecureClient(f"client-{n}", "r", secrets.token_bytes) for n in range(num)}
    roster = {name: client.keys for name, client in clients.items()}
    sent = {name: client.share(roster) for name, client in clients.items()}
    for name, client in clients.items():
        client.receive({sender: sent[sender][name] for sender in clients if sender != name})
    return clients, roster, sent


def test_shares_that_were_changed_or_are_for_another():
    clients, _, sent = started()
    data = bytearray(sent["client-1"]["client-0"])
    data[20] ^= 1
    for forged in (bytes(data), sent["client-1"]["client-2"], b"", sent["client-2"]["client-0"]):
        with pytest.raises(UpdateRefused, match="changed on the way"):
            clients["client-0"].receive({"client-1": forged})


def test_a_client_masks_once_and_reveals_once():
    clients, _, _ = started()
    client, groups = clients["client-0"], {"a": tuple(clients)}
    client.mask({"a": words([1, 2])}, groups)
    with pytest.raises(UpdateRefused, match="groups"):
        client.mask({"a": words([1, 2])}, groups)
    client.reveal(["client-0", "client-1"])
    with pytest.raises(UpdateRefused, match="once"):
        client.reveal(["client-2", "client-3"])


@pytest.mark.parametrize(
    "group", [("client-0", "client-1"), ("client-0", "client-1", "stranger"), ("client-0",) * 3]
)
def test_groups_that_a_client_does_not_accept(group):
    clients, _, _ = started()
    with pytest.raises(UpdateRefused, match="too small or have strangers"):
        clients["client-0"].mask({"a": words([1])}, {"a": group})


def test_no_share_for_a_sum_of_one():
    clients, _, _ = started()
    client = clients["client-0"]
    client.mask({"a": words([1])}, {"a": tuple(clients)})
    with pytest.raises(UpdateRefused, match="only one client"):
        client.reveal(["client-1"])


def test_a_list_with_a_wrong_key():
    client = SecureClient("a", "r", secrets.token_bytes)
    other = SecureClient("b", "r", secrets.token_bytes)
    for roster in ({"b": other.keys}, {"a": other.keys}, {"a": client.keys, "b": client.keys}):
        with pytest.raises(UpdateRefused, match="key"):
            client.share(roster)


def test_tensors_other_than_named():
    clients, roster, _ = started()
    server = SecureServer("r", roster, {"a": tuple(clients), "b": tuple(clients)})
    server.add("client-0", {"a": words([1]), "b": words([2])})
    for client, masked in [
        ("client-0", {"a": words([1]), "b": words([2])}),
        ("client-1", {"a": words([1])}),
        ("client-1", {"a": words([1, 2]), "b": words([2])}),
    ]:
        with pytest.raises(UpdateRefused, match=client):
            server.add(client, masked)


def test_sizes_of_messages():
    _, roster, sent = started()
    assert {KEYS_BYTES} == {sum(map(len, keys)) for keys in roster.values()}
    assert {SEALED_BYTES} == {len(data) for mine in sent.values() for data in mine.values()}


def test_wrong_shares_lose_the_round():
    clients, roster, _ = started()
    groups = {"a": tuple(clients)}
    server = SecureServer("r", roster, groups)
    for name in list(clients)[:3]:
        server.add(name, clients[name].mask({"a": words([1])}, groups))
    clients["client-3"].mask({"a": words([1])}, groups)
    sound = {name: client.reveal(server.came) for name, client in clients.items()}
    one, *_ = sound.values()
    bad_masks = replace(one, own_masks=dict.fromkeys(one.own_masks, bytes(66)))
    bad_keys = replace(one, masking_keys=dict.fromkeys(one.masking_keys, bytes(66)))
    for bad in (bad_masks, bad_keys, Reveal()):
        with pytest.raises(UpdateRefused, match="round is lost"):
            copy.deepcopy(server).unmask({**dict(list(sound.items())[:3]), "client-0": bad})
    assert [3] == server.unmask(sound)["a"].tolist()


def test_a_key_that_is_none():
    clients, roster, _ = started()
    bad = {**roster, "client-9": Keys(bytes(32), bytes(32), bytes(32))}
    with pytest.raises(UpdateRefused, match="is not a key"):
        clients["client-0"].share(bad)


@given(st.binary(min_size=1, max_size=32), st.integers(1, 7), st.data())
def test_shares(secret, threshold, data):
    shares = split(secret, range(1, 8), threshold, secrets.token_bytes)
    some = data.draw(st.permutations(range(1, 8)))[:threshold]
    assert secret == join({place: shares[place] for place in some}, len(secret))
    assume(threshold > 1)
    fewer = {place: shares[place] for place in some[1:]}
    with pytest.raises(ValueError, match="too few"):
        join(fewer, len(secret))
    assert all(int.from_bytes(share, "big") < PRIME for share in shares.values())
