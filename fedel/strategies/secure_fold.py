"""The mean of a method by secure aggregation, with clients and server in one process: for simulations.

The messages are those of ``fedel.core.secure_sum``; nothing but them passes from a client to the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from fedel.core import secure_sum
from fedel.core.aggregation import MaskedMean
from fedel.core.exact_sum import WORD, fixed_point
from fedel.core.secret_sharing import SHARE_BYTES, Random
from fedel.core.secure_server import SecureServer
from fedel.core.secure_sum import SecureClient, Words
from fedel.errors import ConfigError, UpdateRefused
from fedel.types import Array, Folded, ModelSpec, Patch, Tensors, Update


@dataclass(frozen=True)
class _Held:
    """What a client has ready when it names its tensors."""

    patches: Mapping[str, Patch]
    weight: int


class SecureFold:
    """Holds the updates of a round until its end, and plays the protocol then."""

    def __init__(
        self, spec: ModelSpec, weighting: str, round_num: int, secret: bytes, damping: float = 0.0
    ) -> None:
        self._spec, self._by_samples = spec, weighting == "samples"
        self._round, self._secret = f"round {round_num}", secret
        self._shapes = {t.name: t.shape for t in spec.tensors}
        self._mean = MaskedMean(self._shapes, weighted=self._by_samples, damping=damping)
        self._invited: set[str] = set()
        self._held: dict[str, _Held] = {}
        self._dropped: dict[str, Collection[str]] = {}
        self._summed = False
        self.num_clients: dict[str, int] = {}
        """Clients in the sum of each tensor."""

    def invite(self, clients: Collection[str]) -> None:
        """These exchange keys and shares."""
        self._invited |= set(clients)

    def drop(self, client: str, tensors: Collection[str]) -> None:
        """The client names these tensors, and drops out before it sends them."""
        self._dropped[client] = tensors

    def add(self, update: Update) -> None:
        report, patches = update.report, update.patches
        weight = report.num_samples if self._by_samples else 1
        if parts := [name for name, patch in patches.items() if patch.where is not None]:
            raise ConfigError(
                f"[protection] secure: the method sends parts of tensors ('{parts[0]}'), of which no sum per"
                " value is known; take a method that sends whole tensors, such as fedel or fedavg"
            )
        self._mean.check(patches, weight)
        check_room(patches, weight, self._mean.bits, len(self._invited))
        self._held[report.client] = _Held(patches, weight)

    def finish(self, model: Tensors, state: Tensors) -> Folded:
        if not self._summed:
            self._sum()
        return Folded(self._mean.finish(model), state)

    def _sum(self) -> None:
        """The protocol, step by step."""
        self._summed = True
        names = sorted(self._invited | self._held.keys())
        clients = {name: SecureClient(name, self._round, self._random_of(name)) for name in names}
        roster = {name: client.keys for name, client in clients.items()}
        sent = {name: client.share(roster) for name, client in clients.items()}
        for name, client in clients.items():
            client.receive({sender: sealed[name] for sender, sealed in sent.items() if sender != name})
        named = {name: list(held.patches) for name, held in self._held.items()}
        groups = secure_sum.groups_of(named | {n: list(tensors) for n, tensors in self._dropped.items()})
        server = SecureServer(self._round, roster, groups)
        for name, held in self._held.items():
            self._mean.add({}, held.weight)  # who is in the round, whatever came to a sum
            bits = self._mean.bits
            vectors = {
                tensor: words_of(patch.values, held.weight, bits)
                for tensor, patch in held.patches.items()
                if tensor in groups
            }
            if masked := clients[name].mask(vectors, groups):
                server.add(name, masked)
        if not groups:
            return
        reveals = {name: clients[name].reveal(server.came) for name in self._held}
        for tensor, words in server.unmask(reveals).items():
            total = words[:-1].view(np.int64)
            self._mean.add_sum(tensor, total, self._shapes[tensor], int(words[-1]))
            self.num_clients[tensor] = len(set(groups[tensor]) & server.came)

    def _random_of(self, client: str) -> Random:
        """Of a simulation, which can be repeated: a device takes ``secrets.token_bytes``."""
        stream = hashlib.shake_256(self._secret + f"{self._round} {client}".encode())
        position = 0

        def random(num_bytes: int) -> bytes:
            nonlocal position
            position += num_bytes
            return stream.digest(position)[-num_bytes:]

        return random


def check_room(patches: Mapping[str, Patch], weight: int, bits: int, num_clients: int) -> None:
    """The sum of all must fit one word: nobody else can check it, so each client keeps to its share."""
    room = WORD / 2**bits / max(num_clients, 1)
    for name, patch in patches.items():
        largest = float(np.abs(patch.values).max(initial=0))
        if not largest * weight < room:
            raise UpdateRefused("range", f"tensor '{name}' holds values too large for a secure sum")


def words_of(values: Array, weight: int, bits: int) -> Words:
    """A tensor in fixed point, and its client's weight behind it."""
    whole = fixed_point(values, weight, bits).reshape(-1)
    return np.append(whole, np.int64(weight)).view(np.uint64)


def bytes_up(patches: Mapping[str, Patch], num_clients: int) -> int:
    """What a client sends in a round of so many clients: keys, shares, its tensors and weights, shares again.

    Names of tensors and clients are not counted, as they are not in a plain round.
    """
    tensors = sum(8 * (patch.values.size + 1) for patch in patches.values())
    shares = (num_clients - 1) * secure_sum.SEALED_BYTES + num_clients * SHARE_BYTES
    return secure_sum.KEYS_BYTES + shares + tensors
