"""Sums that show no single summand, although clients drop out and sum different tensors.

After Bonawitz et al., *Practical Secure Aggregation for Privacy-Preserving Machine Learning* (2017), with a
step in which clients name their tensors, because with FedEL everyone trains other ones:

1. *Keys.* Each client publishes two keys for the round (``SecureClient.keys``).
2. *Shares.* Each client shares its two secrets among all, sealed for each receiver (``share``).
3. *Names.* Each client names the tensors it will send; the server answers who is in the group of each
   (``groups_of``).
4. *Masked tensors.* A client adds to each tensor a mask of its own, and for everyone else in the group a mask
   that only the two know, added by one and subtracted by the other (``mask``). The server adds these up.
5. *Unmasking.* For a client whose tensors came, the others reveal their shares of its own mask; for one that
   dropped out after it named its tensors, those of its key for the masks of pairs (``reveal``). Never both.

Numbers are whole, modulo 2^64. Nothing here reads a socket, a file or a clock. The server must follow the
protocol, or not be able to lie about who takes part: docs/privacy.md says what it is not safe from.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedel.core.secret_sharing import SHARE_BYTES, Random, split
from fedel.errors import UpdateRefused

Words = NDArray[np.uint64]
MIN_GROUP = 3
"""Clients that must name a tensor for it to be summed. With fewer, the sum would say too much about each."""
MIN_LEFT = 2
"""Of these, clients whose tensor must have come before anyone reveals a share."""
KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
KEYS_BYTES = 3 * KEY_BYTES
SEALED_BYTES = _NONCE_BYTES + 2 * SHARE_BYTES + _TAG_BYTES


def threshold_of(num_clients: int) -> int:
    """Clients that must stay to the end: more than two thirds.

    >>> [threshold_of(n) for n in (3, 4, 10, 100)]
    [3, 3, 7, 67]
    """
    return 2 * num_clients // 3 + 1


def attempt_name(round_num: int, attempt: int) -> str:
    """The name of an attempt at a round: masks are good for nothing else."""
    return f"round {round_num}, attempt {attempt}"


def is_key(public: bytes) -> bool:
    """Whether others can agree on a secret with the owner of this key."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


class Keys(NamedTuple):
    """A client's public keys for one round."""

    sealing: bytes
    masking: bytes
    own_mask_digest: bytes
    """Of the secret behind its own mask, so that nobody can pass a wrong one off for it."""


@dataclass(frozen=True)
class Reveal:
    """A client's shares of others' secrets, by their owner."""

    own_masks: Mapping[str, bytes] = field(default_factory=dict)
    """Of those whose tensors came."""
    masking_keys: Mapping[str, bytes] = field(default_factory=dict)
    """Of those that dropped out."""


def groups_of(named: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """By tensor: the clients that send it. One that too few trained is not summed, and keeps its values."""
    tensors = sorted({tensor for tensors in named.values() for tensor in tensors})
    groups = {t: tuple(sorted(client for client in named if t in named[client])) for t in tensors}
    return {tensor: group for tensor, group in groups.items() if len(group) >= MIN_GROUP}


class SecureClient:
    """A client's part, for one round. Each method is one step, done once."""

    def __init__(self, name: str, round_name: str, random: Random) -> None:
        """``round_name`` is the same for all; a mask is good for one round."""
        self.name, self._round, self._random = name, round_name, random
        self._sealing, self._masking, self._own_mask = (random(KEY_BYTES) for _ in range(3))
        self._roster: Mapping[str, Keys] = {}
        self._groups: Mapping[str, Collection[str]] = {}
        self._kept: dict[str, tuple[bytes, bytes]] = {}
        """Shares of the others' own masks and masking keys."""
        self._has_revealed = False

    @property
    def keys(self) -> Keys:
        return Keys(public_of(self._sealing), public_of(self._masking), digest_of(self._own_mask))

    def share(self, roster: Mapping[str, Keys]) -> dict[str, bytes]:
        """Sealed shares of this client's secrets, by receiver."""
        if roster.get(self.name) != self.keys or len(set(roster.values())) < len(roster):
            raise refusal(f"client '{self.name}' is in the list with a wrong key, or a key is there twice")
        self._roster, threshold = roster, threshold_of(len(roster))
        places = places_of(roster)
        masks = split(self._own_mask, places.values(), threshold, self._random)
        keys = split(self._masking, places.values(), threshold, self._random)
        self._kept[self.name] = masks[places[self.name]], keys[places[self.name]]
        return {
            other: self._seal(other, masks[place] + keys[place])
            for other, place in places.items()
            if other != self.name
        }

    def _cipher(self, other: str) -> AESGCM:
        secret = _agree(self._sealing, self._roster[other].sealing, self._round, "seal", self.name, other)
        return AESGCM(secret)

    def _seal(self, receiver: str, shares: bytes) -> bytes:
        nonce = self._random(_NONCE_BYTES)
        return nonce + self._cipher(receiver).encrypt(nonce, shares, _pair(self.name, receiver))

    def receive(self, sealed: Mapping[str, bytes]) -> None:
        """Keep the shares that others sent; who sent none cannot take part."""
        for sender, data in sealed.items():
            nonce, text = data[:_NONCE_BYTES], data[_NONCE_BYTES:]
            try:
                shares = self._cipher(sender).decrypt(nonce, text, _pair(sender, self.name))
            except (InvalidTag, ValueError):
                raise refusal(f"the shares from '{sender}' to '{self.name}' were changed on the way") from None
            self._kept[sender] = shares[:SHARE_BYTES], shares[SHARE_BYTES:]

    def mask(self, vectors: Mapping[str, Words], groups: Mapping[str, Collection[str]]) -> dict[str, Words]:
        """The client's tensors for the server, those that have a group."""
        strangers = {client for group in groups.values() for client in group} - self._kept.keys()
        mine = [tensor for tensor, group in groups.items() if self.name in group]
        small = [tensor for tensor in mine if len(set(groups[tensor])) < MIN_GROUP]
        if strangers or small or set(mine) - vectors.keys() or self._groups:
            raise refusal(f"client '{self.name}' was told groups that are too small or have strangers in them")
        self._groups = groups
        masked = {t: vectors[t] + mask_stream(self._own_mask, t, vectors[t].size) for t in mine}
        for other in sorted({client for tensor in mine for client in groups[tensor]} - {self.name}):
            seed = pair_seed(self._masking, self.name, other, self._roster[other].masking, self._round)
            for tensor in mine:
                if other in groups[tensor]:
                    add_mask(masked[tensor], mask_stream(seed, tensor, masked[tensor].size), self.name < other)
        return masked

    def reveal(self, came: Collection[str]) -> Reveal:
        """Shares for the server, once the tensors of ``came`` are there; none if a sum would be of one."""
        named = {client for group in self._groups.values() for client in group}
        left = {tensor: len(set(group) & set(came)) for tensor, group in self._groups.items()}
        alone = sorted(tensor for tensor, count in left.items() if 0 < count < MIN_LEFT)
        if self._has_revealed or not set(came) <= named:
            raise refusal(f"client '{self.name}' reveals shares once, of clients that named their tensors")
        if alone:
            raise refusal(
                f"too many dropped out: of {', '.join(alone)} only one client's came, which nobody may see; the"
                " round is lost"
            )
        self._has_revealed = True
        return Reveal(
            {client: self._kept[client][0] for client in came},
            {client: self._kept[client][1] for client in named - set(came)},
        )


def places_of(roster: Collection[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(sorted(roster), start=1)}


def public_of(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def digest_of(secret: bytes) -> bytes:
    return hashlib.sha256(b"fedel own mask" + secret).digest()


def _pair(*names: str) -> bytes:
    """Names cannot run into each other."""
    return b"".join(len(name.encode()).to_bytes(4, "big") + name.encode() for name in names)


def _agree(private: bytes, public: bytes, round_name: str, purpose: str, *names: str) -> bytes:
    """A key that the two owners of a pair of keys have in common."""
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError:
        raise refusal(f"a key of {' or '.join(names)} is not a key") from None
    info = _pair("fedel", round_name, purpose, *sorted(names))
    return HKDF(SHA256(), KEY_BYTES, None, info).derive(secret)


def pair_seed(private: bytes, one: str, other: str, public: bytes, round_name: str) -> bytes:
    return _agree(private, public, round_name, "mask", one, other)


def mask_stream(seed: bytes, tensor: str, size: int) -> Words:
    """The mask of one tensor: AES-256 in counter mode, with a key of its own."""
    key = hmac.new(seed, tensor.encode(), hashlib.sha256).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), "<u8")


def add_mask(words: Words, mask: Words, positive: bool) -> None:
    if positive:
        words += mask
    else:
        words -= mask


def refusal(message: str) -> UpdateRefused:
    return UpdateRefused("secure", f"secure aggregation: {message}")
