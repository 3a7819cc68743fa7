"""Secure aggregation as the coordinator sees it: which step an attempt is at, and what has come so far.

Clients train, then: *keys* (who has trained names its keys and tensors), *shares* (everyone in the roster
shares its secrets), *upload* (those who shared mask and send), *reveal* (those whose update came reveal what
takes the masks off). The coordinator relays and never holds a secret that was not revealed to it. If too many
are lost on the way, the round is attempted again, with new keys. Before the reveal nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from fedel.core.secure_server import Opened
from fedel.core.secure_sum import MIN_LEFT, Keys, Reveal, groups_of, threshold_of
from fedel.security.signed_keys import Proof

KEYS, SHARES, UPLOAD, REVEAL = "keys", "shares", "upload", "reveal"


@dataclass(frozen=True)
class SecureRound:
    """One attempt at a round."""

    attempt: int = 0
    """Number of the attempt: a later one has a higher number, also after a restart."""
    step: str = KEYS
    keys: Mapping[str, Keys] = field(default_factory=dict)
    """Who has trained; once the step is over, the roster."""
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By client: the tensors that it trained."""
    proofs: Mapping[str, Proof] = field(default_factory=dict)
    """That the keys are the clients' own, which only the clients check."""
    shares: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    """By sender and receiver, sealed."""
    came: tuple[str, ...] = ()
    """Whose update every aggregator holds."""
    reveals: Mapping[str, Reveal] = field(default_factory=dict)
    opened: Opened | None = None
    """What takes the masks off, once enough has been revealed."""

    @property
    def threshold(self) -> int:
        """Clients that must stay to the end."""
        return threshold_of(len(self.keys))

    @property
    def masking(self) -> dict[str, tuple[str, ...]]:
        """Who masks its update with whom: the tensors of those who shared."""
        return {client: self.named[client] for client in sorted(self.shares)}

    def with_roster(self, clients: Collection[str]) -> SecureRound:
        """Go on with these."""
        keys = {client: self.keys[client] for client in sorted(clients)}
        return replace(self, step=SHARES, keys=keys, named={client: self.named[client] for client in keys})

    def shares_for(self, receiver: str) -> dict[str, bytes]:
        return {sender: sealed[receiver] for sender, sealed in self.shares.items() if sender != receiver}

    @property
    def summed(self) -> tuple[str, ...]:
        """Of those whose update came, the clients that are in a sum."""
        members = {client for group in groups_of(self.masking).values() for client in group}
        return tuple(client for client in self.came if client in members)

    def alone(self, came: Collection[str]) -> list[str]:
        """Tensors whose sum would be of one client, which nobody may see."""
        left = {tensor: len(set(group) & set(came)) for tensor, group in groups_of(self.masking).items()}
        return sorted(tensor for tensor, count in left.items() if 0 < count < MIN_LEFT)

    def to_store(self) -> SecureRound:
        """What a restarted coordinator needs to finish the commit."""
        return SecureRound(self.attempt, REVEAL, came=self.came, opened=self.opened)
