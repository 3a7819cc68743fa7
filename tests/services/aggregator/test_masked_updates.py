"""Masked updates on a real aggregator: attempts, restarts, and what it refuses."""

import secrets

import numpy as np

from fedel.core.aggregation import MaskedMean
from fedel.core.secure_server import opened
from fedel.core.secure_sum import SecureClient, attempt_name, groups_of
from fedel.strategies.secure_fold import words_of
from fedel.types import Patch
from fedel.v1 import aggregator_pb2 as pb
from fedel.wire.payload import pack
from fedel.wire.secure_codec import opened_to_pb
from fedel.wire.streams import fetch_model, push_update

from .support import (
    CLIENTS,
    SPEC,
    aggregator,
    asynchronous,
    bits,
    create,
    first_model,
    fold_directly,
    make_update,
    refusal,
    samples_of,
    seal,
    send,
)

NAMES = ("a", "b", "c", "d")


class Attempt:
    """Four clients that have masked their updates for each other."""

    def __init__(self, number, weigh=samples_of):
        self.number, self.updates = number, {name: make_update(name) for name in NAMES}
        clients = {n: SecureClient(n, attempt_name(0, number), secrets.token_bytes) for n in NAMES}
        self.roster = {name: client.keys for name, client in clients.items()}
        sent = {name: client.share(self.roster) for name, client in clients.items()}
        self.named = {name: tuple(update.patches) for name, update in self.updates.items()}
        self.masked = {}
        for name, client in clients.items():
            client.receive({sender: shares[name] for sender, shares in sent.items() if sender != name})
            patches, bits_ = self.updates[name].patches, MaskedMean(weighted=True).bits
            vectors = {t: words_of(patch.values, weigh(name), bits_) for t, patch in patches.items()}
            self.masked[name] = client.mask(vectors, groups_of(self.named))
        self._clients = clients

    def unmask(self, came):
        reveals = {name: self._clients[name].reveal(came) for name in came}
        what = opened(attempt_name(0, self.number), self.roster, self.named, came, reveals)
        return opened_to_pb(what, self.number, SPEC)

    async def send(self, stub, name, attempt=None):
        payload = pack({tensor: Patch(words) for tensor, words in self.masked[name].items()})
        number = self.number if attempt is None else attempt
        return await push_update(stub, "run", self.updates[name].report, payload, attempt=number)


async def open_attempt(stub, number):
    participants = [
        pb.Participant(client=client, num_samples=samples_of(client), max_steps=10, max_effective_steps=100)
        for client in CLIENTS
    ]
    request = pb.OpenRoundRequest(run="run", round_num=0, participants=participants, attempt=number)
    await stub.OpenRound(request)


def commit(stub, clients, unmask=None):
    return stub.CommitRound(pb.CommitRoundRequest(run="run", round_num=0, clients=clients, unmask=unmask))


@asynchronous
async def test_sum_after_a_restart_and_a_lost_client(tmp_path):
    model, attempt, came = first_model(), Attempt(7), NAMES[:3]
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, model, protection={"secure": True})
        await open_attempt(stub, 7)
        for name in NAMES[:2]:
            await attempt.send(stub, name)
    async with aggregator(tmp_path) as (stub, _):
        await attempt.send(stub, "c")
        assert list(came) == [report.client for report in await seal(stub, 0)]
        unmask = attempt.unmask(came)
        first = await commit(stub, came, unmask)
        assert first == await commit(stub, came, unmask)
        made = await fetch_model(stub, "run")
    expected = fold_directly([attempt.updates[name] for name in came], model)
    assert bits(expected.model) == bits(made.tensors)


@asynchronous
async def test_another_attempt_discards_the_updates(tmp_path):
    first, second = Attempt(7), Attempt(8)
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, protection={"secure": True})
        await open_attempt(stub, 7)
        for name in NAMES:
            await first.send(stub, name)
        assert ("UNAVAILABLE", "not_open") == await refusal(second.send(stub, "a"))
        await open_attempt(stub, 8)
        assert [] == await seal(stub, 0)
        await open_attempt(stub, 8)
        assert ("FAILED_PRECONDITION", "late") == await refusal(first.send(stub, "a"))
        for name in NAMES:
            await second.send(stub, name)
        assert ("INVALID_ARGUMENT", "masked") == await refusal(commit(stub, NAMES, first.unmask(NAMES)))
        assert 1 == (await commit(stub, NAMES, second.unmask(NAMES))).version


@asynchronous
async def test_what_a_masked_run_refuses(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub, protection={"secure": True})
        await open_attempt(stub, 7)
        assert ("INVALID_ARGUMENT", "dtype") == await refusal(
            push_update(stub, "run", make_update("a").report, pack(make_update("a").patches), attempt=7)
        )
        attempt = Attempt(7, weigh=lambda name: samples_of(name) + (name == "b"))
        for name in NAMES:
            await attempt.send(stub, name)
        assert ("INVALID_ARGUMENT", "masked") == await refusal(commit(stub, NAMES))
        assert ("INVALID_ARGUMENT", "secure") == await refusal(commit(stub, NAMES, attempt.unmask(NAMES)))
        assert 0 == (await fetch_model(stub, "run")).version


@asynchronous
async def test_plain_runs_take_nothing_masked(tmp_path):
    async with aggregator(tmp_path) as (stub, _):
        await create(stub)
        words = {
            name: Patch(patch.values.astype(np.uint64)) for name, patch in make_update("a").patches.items()
        }
        refused = await refusal(push_update(stub, "run", make_update("a").report, pack(words)))
        assert ("INVALID_ARGUMENT", "dtype") == refused
        await send(stub, make_update("a"))
