"""The agent's part of secure aggregation: between the training of a round and its upload, and once after it.

The secrets of an attempt are in memory only: an agent that is restarted takes part in the next attempt.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial

from fedel.core.aggregation import MaskedMean
from fedel.core.secure_sum import SecureClient, attempt_name, groups_of
from fedel.errors import ConfigError, UpdateRefused
from fedel.security import signed_keys
from fedel.security.certificates import utc_now
from fedel.security.folder import Credentials
from fedel.strategies.secure_fold import check_room, words_of
from fedel.types import Change, Patch
from fedel.v1 import aggregator_pb2
from fedel.v1 import coordinator_pb2 as pb
from fedel.v1.coordinator_pb2 import SessionRequest
from fedel.wire.payload import pack, unpack
from fedel.wire.secure_codec import (
    keys_from_pb,
    member_to_pb,
    names_of,
    proof_from_pb,
    shares_from_pb,
    shares_to_pb,
    signed_text,
)
from fedel_edge.joined_runs import JoinedRun
from fedel_edge.run_folder import StoredUpdate
from fedel_edge.worker import Worker

Send = Callable[[SessionRequest], None]


class Exchange:
    """One attempt at a round."""

    def __init__(self, client: str, round_num: int, attempt: int) -> None:
        self._client, self._round_num = client, round_num
        self.num_bytes = 0
        """Sent to the coordinator, for the other clients."""
        self.said: SessionRequest | None = None
        """The last message, sent again if the coordinator sends the task again."""
        self._rosters: asyncio.Queue[pb.SecureRoster] = asyncio.Queue()
        self._groups: asyncio.Queue[pb.SecureGroup] = asyncio.Queue()
        self._reveal: SessionRequest | None = None
        self.renew(attempt)

    def renew(self, attempt: int) -> None:
        """Take part in this attempt instead; only before anything was said."""
        self.attempt = attempt
        name = attempt_name(self._round_num, attempt)
        self._side = SecureClient(self._client, name, secrets.token_bytes)

    def hear(self, message: pb.SecureRoster | pb.SecureGroup | pb.SecureUnmask) -> SessionRequest | None:
        """A message of the coordinator about this attempt, and the answer if there is one at once."""
        if isinstance(message, pb.SecureUnmask):
            return self._revealed(message)
        if isinstance(message, pb.SecureRoster) and self._rosters.empty():
            self._rosters.put_nowait(message)
        elif isinstance(message, pb.SecureGroup) and self._groups.empty():
            self._groups.put_nowait(message)
        return None

    def _revealed(self, message: pb.SecureUnmask) -> SessionRequest:
        """The same answer if it is asked again: shares are revealed once."""
        if self._reveal is None:
            reveal = self._side.reveal(message.came)
            answer = pb.SecureReveal(
                run=message.run,
                round_num=self._round_num,
                attempt=self.attempt,
                own_masks=shares_to_pb(reveal.own_masks),
                masking_keys=shares_to_pb(reveal.masking_keys),
            )
            self._reveal = SessionRequest(reveal=answer)
        return self._reveal

    async def masked(
        self,
        run: JoinedRun,
        update: StoredUpdate,
        worker: Worker,
        send: Send,
        credentials: Credentials | None = None,
    ) -> StoredUpdate:
        """Agree on masks with the other clients; the update as the aggregators may see it.

        With ``credentials``, a client whose keys are not signed with its certificate is not believed.
        """
        spec, name, round_num, attempt = run.trainer.spec, run.name, self._round_num, self.attempt
        tensors = [entry.name for entry in update.header.tensors]
        member = member_to_pb(self._client, self._side.keys, tensors, spec)
        if credentials is not None:
            proof = signed_keys.sign(credentials, signed_text(name, round_num, attempt, member))
            member.certificate, member.signature = proof.certificate, proof.signature
        keys = pb.SecureKeys(run=name, round_num=round_num, attempt=attempt, member=member)
        self._say(send, SessionRequest(keys=keys))
        members = (await self._rosters.get()).members
        if credentials is not None:
            for each in members:
                text = signed_text(name, round_num, attempt, each)
                signed_keys.check(credentials, each.client, text, proof_from_pb(each), utc_now())
        named = {member.client: names_of(member.tensors, spec) for member in members}
        roster = {member.client: keys_from_pb(member) for member in members}
        shares = shares_to_pb(await worker.run(partial(self._side.share, roster)))
        answer = pb.SecureShares(run=name, round_num=round_num, attempt=attempt, shares=shares)
        self._say(send, SessionRequest(shares=answer))
        sealed = shares_from_pb((await self._groups.get()).shares)
        if not sealed.keys() <= named.keys():
            raise UpdateRefused("secure", "secure aggregation: there are shares of clients that take no part")
        masking = {client: named[client] for client in (*sealed, self._client)}
        self._side.receive(sealed)
        return await worker.run(partial(self._mask, run, update, masking, len(roster)))

    def _say(self, send: Send, message: SessionRequest) -> None:
        self.said = message
        self.num_bytes += message.ByteSize()
        send(message)

    def _mask(
        self, run: JoinedRun, update: StoredUpdate, named: dict[str, tuple[str, ...]], num_clients: int
    ) -> StoredUpdate:
        """In the worker's thread."""
        spec, by_samples = run.trainer.spec, run.strategy.weighting == "samples"
        weight = min(run.trainer.num_samples, run.config.rounds.max_samples) if by_samples else 1
        mean, patches = MaskedMean(weighted=by_samples), dict[str, Patch]()
        for entry, data in zip(update.payload.manifest, update.payload.buffers, strict=True):
            patch = unpack(entry, data, spec.by_name[entry.name].shape)
            if isinstance(patch, Change) or patch.where is not None:
                raise ConfigError(f"[protection] secure: the method sends a part of tensor '{entry.name}'")
            patches[entry.name] = patch
        mean.check(patches, weight)
        check_room(patches, weight, mean.bits, num_clients)
        groups = groups_of(named)
        vectors = {n: words_of(p.values, weight, mean.bits) for n, p in patches.items() if n in groups}
        payload = pack({name: Patch(words) for name, words in self._side.mask(vectors, groups).items()})
        header = aggregator_pb2.UpdateHeader(
            run=run.name,
            report=update.header.report,
            tensors=payload.manifest,
            digest=payload.digest,
            attempt=self.attempt,
        )
        return StoredUpdate(header, payload)
