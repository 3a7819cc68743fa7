"""The server's part of secure aggregation: what it gets to see is masked, what it opens is a sum.

The steps are those of ``fedel.core.secure_sum``. Who relays the messages joins the revealed shares
(``opened``); who holds the sum takes the masks off it (``take_off``). In a simulation ``SecureServer`` does
both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field

from fedel.core.secret_sharing import join
from fedel.core.secure_sum import (
    KEY_BYTES,
    Keys,
    Reveal,
    Words,
    add_mask,
    digest_of,
    groups_of,
    mask_stream,
    pair_seed,
    places_of,
    public_of,
    refusal,
    threshold_of,
)


@dataclass(frozen=True)
class Opened:
    """What the clients revealed: all that takes the masks off the sums of one round."""

    round_name: str
    named: Mapping[str, tuple[str, ...]]
    """By client: its tensors. Everyone who got the others' shares is here."""
    public: Mapping[str, bytes]
    """By client: its public masking key."""
    own_masks: Mapping[str, bytes] = field(default_factory=dict)
    """Of those whose tensors came: the secrets behind their own masks."""
    masking_keys: Mapping[str, bytes] = field(default_factory=dict)
    """Of those that dropped out: their private masking keys."""


def opened(
    round_name: str,
    roster: Mapping[str, Keys],
    named: Mapping[str, Collection[str]],
    came: Collection[str],
    reveals: Mapping[str, Reveal],
) -> Opened:
    """Join the revealed shares; refused if they are too few or wrong."""
    in_groups = {client for group in groups_of(named).values() for client in group}
    own_masks, masking_keys = {}, {}
    for client in sorted(in_groups & set(came)):
        shares = {name: r.own_masks[client] for name, r in reveals.items() if client in r.own_masks}
        own_masks[client] = _join(roster, shares)
        if digest_of(own_masks[client]) != roster[client].own_mask_digest:
            raise refusal(f"the shares of the mask of '{client}' are wrong: the round is lost")
    for client in sorted(in_groups - set(came)):
        shares = {name: r.masking_keys[client] for name, r in reveals.items() if client in r.masking_keys}
        masking_keys[client] = _join(roster, shares)
        if public_of(masking_keys[client]) != roster[client].masking:
            raise refusal(f"the shares of the key of '{client}' are wrong: the round is lost")
    public = {client: roster[client].masking for client in named}
    tensors = {client: tuple(sorted(named[client])) for client in named}
    return Opened(round_name, tensors, public, own_masks, masking_keys)


def _join(roster: Mapping[str, Keys], shares: Mapping[str, bytes]) -> bytes:
    places, wanted = places_of(roster), threshold_of(len(roster))
    if len(shares) < wanted:
        raise refusal(f"only {len(shares)} clients stayed to the end, {wanted} are needed: the round is lost")
    some = sorted(shares)[:wanted]
    try:
        return join({places[name]: shares[name] for name in some}, KEY_BYTES)
    except ValueError as error:
        raise refusal(f"{error}: the round is lost") from None


def take_off(secrets: Opened, sums: MutableMapping[str, Words]) -> None:
    """Take all masks off the sums, which are changed in place. There may be sums of some tensors only."""
    groups = groups_of(secrets.named)

    def mine(client: str) -> list[str]:
        return [tensor for tensor, group in groups.items() if client in group and tensor in sums]

    for client, own_mask in secrets.own_masks.items():
        for tensor in mine(client):
            add_mask(sums[tensor], mask_stream(own_mask, tensor, sums[tensor].size), False)
    for client, masking in secrets.masking_keys.items():
        for other in secrets.own_masks:
            seed = pair_seed(masking, client, other, secrets.public[other], secrets.round_name)
            for tensor in mine(client):
                if other in groups[tensor]:
                    # What the other added for this pair, the client would have subtracted.
                    add_mask(sums[tensor], mask_stream(seed, tensor, sums[tensor].size), client < other)


class SecureServer:
    """Both parts in one, for one round."""

    def __init__(
        self, round_name: str, roster: Mapping[str, Keys], groups: Mapping[str, Collection[str]]
    ) -> None:
        self._round, self._roster, self._groups = round_name, roster, groups
        self._sums: dict[str, Words] = {}
        self.came: set[str] = set()

    def add(self, client: str, masked: Mapping[str, Words]) -> None:
        """Add a client's masked tensors up."""
        mine = {tensor for tensor, group in self._groups.items() if client in group}
        if client in self.came or mine != masked.keys():
            raise refusal(f"client '{client}' sent other tensors than it named, or sent them twice")
        for tensor, words in masked.items():
            if tensor in self._sums and self._sums[tensor].size != words.size:
                raise refusal(f"client '{client}' sent {words.size} numbers of tensor '{tensor}'")
        for tensor, words in masked.items():
            self._sums[tensor] = self._sums[tensor] + words if tensor in self._sums else words.copy()
        self.came.add(client)

    def unmask(self, reveals: Mapping[str, Reveal]) -> dict[str, Words]:
        """The sums over the clients whose tensors came, by tensor."""
        named: dict[str, list[str]] = {}
        for tensor, group in self._groups.items():
            for client in group:
                named.setdefault(client, []).append(tensor)
        take_off(opened(self._round, self._roster, named, self.came, reveals), self._sums)
        return dict(self._sums)
