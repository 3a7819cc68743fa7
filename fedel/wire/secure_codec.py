"""Between protobuf and the messages of secure aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedel.core.secure_server import Opened
from fedel.core.secure_sum import Keys, Reveal, attempt_name
from fedel.errors import UpdateRefused
from fedel.security.signed_keys import NO_PROOF, Proof
from fedel.types import ModelSpec
from fedel.v1 import aggregator_pb2, coordinator_pb2


def member_to_pb(
    client: str, keys: Keys, tensors: Iterable[str], spec: ModelSpec, proof: Proof = NO_PROOF
) -> coordinator_pb2.SecureMember:
    return coordinator_pb2.SecureMember(
        client=client,
        sealing=keys.sealing,
        masking=keys.masking,
        own_mask_digest=keys.own_mask_digest,
        tensors=_places(tensors, spec),
        certificate=proof.certificate,
        signature=proof.signature,
    )


def signed_text(run: str, round_num: int, attempt: int, member: coordinator_pb2.SecureMember) -> bytes:
    """What a client signs of its keys."""
    bare = coordinator_pb2.SecureMember()
    bare.CopyFrom(member)
    bare.ClearField("certificate")
    bare.ClearField("signature")
    bare.DiscardUnknownFields()
    message = coordinator_pb2.SecureKeys(run=run, round_num=round_num, attempt=attempt, member=bare)
    return message.SerializeToString(deterministic=True)


def proof_from_pb(message: coordinator_pb2.SecureMember) -> Proof:
    return Proof(message.certificate, message.signature)


def keys_from_pb(message: coordinator_pb2.SecureMember) -> Keys:
    return Keys(message.sealing, message.masking, message.own_mask_digest)


def shares_to_pb(shares: Mapping[str, bytes]) -> list[coordinator_pb2.SecureShare]:
    return [coordinator_pb2.SecureShare(client=client, data=data) for client, data in shares.items()]


def shares_from_pb(shares: Iterable[coordinator_pb2.SecureShare]) -> dict[str, bytes]:
    return {share.client: share.data for share in shares}


def reveal_from_pb(message: coordinator_pb2.SecureReveal) -> Reveal:
    return Reveal(shares_from_pb(message.own_masks), shares_from_pb(message.masking_keys))


def opened_to_pb(opened: Opened, attempt: int, spec: ModelSpec) -> aggregator_pb2.Unmask:
    members = [
        aggregator_pb2.UnmaskMember(
            client=client,
            masking=opened.public[client],
            tensors=_places(tensors, spec),
            own_mask=opened.own_masks.get(client, b""),
            masking_key=opened.masking_keys.get(client, b""),
        )
        for client, tensors in opened.named.items()
    ]
    return aggregator_pb2.Unmask(attempt=attempt, members=members)


def opened_from_pb(message: aggregator_pb2.Unmask, round_num: int, spec: ModelSpec) -> Opened:
    members = message.members
    return Opened(
        attempt_name(round_num, message.attempt),
        {m.client: names_of(m.tensors, spec) for m in members},
        {m.client: m.masking for m in members},
        {m.client: m.own_mask for m in members if m.own_mask},
        {m.client: m.masking_key for m in members if m.masking_key},
    )


def _places(tensors: Iterable[str], spec: ModelSpec) -> list[int]:
    places = {tensor.name: place for place, tensor in enumerate(spec.tensors)}
    return sorted(places[name] for name in tensors)


def names_of(places: Sequence[int], spec: ModelSpec) -> tuple[str, ...]:
    """Tensors by their places in the model; refused if there is no such place, or one is named twice."""
    if len(set(places)) != len(places) or not all(0 <= place < len(spec.tensors) for place in places):
        raise UpdateRefused("secure", "it names tensors that the model does not have, or one of them twice")
    return tuple(spec.tensors[place].name for place in sorted(places))
