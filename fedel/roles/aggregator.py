"""The aggregator's decisions: which updates a round takes, what it closes with, and what they fold to.

Nothing here reads a file, a clock or a socket. Rounds and versions share their numbers: version v of the model
is the one before round v, so the open round has the number of the newest version.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from fedel.core.importance import global_change
from fedel.core.secure_server import Opened
from fedel.errors import UpdateRefused, VersionRefused
from fedel.job import Protection, Server
from fedel.roles.gate import objection_to_report, weighed
from fedel.strategies.masked_fold import MaskedFold, masked_spec
from fedel.strategies.protection import RoundStart, protected_fold
from fedel.strategies.secure_fold import SecureFold
from fedel.strategies.server_steps import ServerSteps
from fedel.types import ModelSpec, Participant, Report, Role, Strategy, Tensors, Update

HERE = "this aggregator"
"""How a refusal begins that is about the aggregator itself; who passes it on writes the address instead."""


class Content(NamedTuple):
    """The content of an update: two updates of a client with equal content are the same update."""

    round_num: int
    """The round that the client trained for."""
    digest: str


class Upload(NamedTuple):
    """An update that a client wants to send."""

    client: str
    content: Content
    attempt: int = 0
    """With secure aggregation: whose masks are in it."""

    @property
    def task(self) -> tuple[str, int]:
        """The client, and the round of the task that it did."""
        return self.client, self.content.round_num


class Verdict(Enum):
    """What to do with an upload that is not refused."""

    TAKE = "take"
    """Receive it, from the first byte that is missing."""
    DUPLICATE = "duplicate"
    """It counts already: confirm it and receive nothing."""


class ShardRound:
    """The open round of a run on one aggregator: open, then sealed, then committed as the next version.

    The decisions are safe to ask for again: the same upload, seal or commit gets the same answer.
    """

    def __init__(
        self,
        run: str,
        number: int,
        *,
        max_staleness: int = 0,
        sealed: bool = False,
        ended: bool = False,
        accepted: Iterable[Upload] = (),
        participants: Iterable[Participant] | None = None,
        attempt: int = 0,
        counted_before: Iterable[tuple[str, Content]] = (),
    ) -> None:
        """``max_staleness``: the most rounds that an update may be late. ``ended``: the run is over.
        ``participants``: who may send an update; ``None`` until the coordinator says it. ``counted_before``:
        what the rounds before closed with, by client: the last one, and as many as an update may be late."""
        self.run, self.number, self.sealed, self.ended = run, number, sealed, ended
        self.attempt = attempt
        self._max_staleness = max_staleness
        self._participants = None if participants is None else _by_task(participants)
        self._accepted = {upload.client: upload.content for upload in accepted}
        self._counted_before = {(client, content.round_num): content for client, content in counted_before}

    @property
    def clients(self) -> list[str]:
        """Clients whose updates are in, sorted."""
        return sorted(self._accepted)

    def admit(self, upload: Upload) -> Verdict:
        """Whether to take an upload; raises ``UpdateRefused`` with the reason if it cannot be taken."""
        client, content, attempt = upload
        accepted, before = self._accepted.get(client), self._counted_before.get(upload.task)
        if content in (accepted, before):
            return Verdict.DUPLICATE
        if content.round_num == self.number:
            self._check_attempt(client, attempt)
        if any(other is not None and other.round_num == content.round_num for other in (accepted, before)):
            raise UpdateRefused(
                "conflict", f"client '{client}' already sent another update of round {content.round_num}"
            )
        self._check_in_time(client, content.round_num)
        if accepted is not None:
            raise UpdateRefused(
                "conflict", f"client '{client}' already counts in round {self.number}, with its late update"
            )
        self.participant(client, content.round_num)
        return Verdict.TAKE

    def participant(self, client: str, round_num: int) -> Participant:
        """What the coordinator said about the client that has a task of this round; refused if it has none."""
        if self._participants is None:
            raise UpdateRefused(
                "not_open", f"round {self.number} of run '{self.run}' is not open yet: try again in a moment"
            )
        try:
            return self._participants[client, round_num]
        except KeyError:
            raise UpdateRefused(
                "unplanned", f"client '{client}' has no task in round {round_num} of run '{self.run}'"
            ) from None

    def _check_attempt(self, client: str, attempt: int) -> None:
        if attempt > self.attempt:
            raise UpdateRefused(
                "not_open",
                f"attempt {attempt} at round {self.number} of run '{self.run}' is not open yet: try"
                " again in a moment",
            )
        if attempt < self.attempt:
            raise UpdateRefused(
                "late", f"client '{client}' masked its update for attempt {attempt}, which was given up"
            )

    def open(self, participants: Iterable[Participant], attempt: int = 0) -> list[str]:
        """Take updates of these clients. A round that is sealed or ended is open again, with what it has; at
        another attempt of secure aggregation it has nothing. Returns the clients whose late updates, from an
        earlier round, count no longer: they were given up, and may have another task."""
        if attempt != self.attempt:
            self.attempt, self._accepted = attempt, {}
        self._participants = planned = _by_task(participants)
        self.sealed = self.ended = False
        late = {client: each for client, each in self._accepted.items() if each.round_num < self.number}
        given_up = sorted(client for client, each in late.items() if (client, each.round_num) not in planned)
        for client in given_up:
            del self._accepted[client]
        return given_up

    def _check_in_time(self, client: str, round_num: int) -> None:
        if self.ended:
            raise UpdateRefused("ended", f"run '{self.run}' is over: it takes no update of client '{client}'")
        if round_num > self.number:
            raise UpdateRefused(
                "early", f"round {round_num} of run '{self.run}' is not open yet: round {self.number} is"
            )
        if round_num < self.number - self._max_staleness or (self.sealed and not self._max_staleness):
            raise UpdateRefused(
                "late", f"round {round_num} of run '{self.run}' is closed: client '{client}' is too late"
            )
        if self.sealed:
            raise UpdateRefused(
                "sealed",
                f"round {self.number} of run '{self.run}' is being closed: send it again for the next one",
            )

    def accept(self, upload: Upload) -> None:
        """From now on the upload, which was admitted, counts."""
        self._accepted[upload.client] = upload.content

    def is_answered(self, round_num: int) -> bool:
        """Whether a request to seal or commit repeats one of the round before, which has its answer.

        Refused if it is about any other round than that and the open one.
        """
        if round_num not in (self.number, self.number - 1):
            raise UpdateRefused(
                "other_round",
                f"{HERE} is at round {self.number} of run '{self.run}', the database at {round_num}: restore"
                " both from one backup",
            )
        return round_num == self.number - 1

    def seal(self) -> None:
        """Take no further update."""
        self.sealed = True

    def end(self) -> None:
        """Take no further update of the run."""
        self.ended = True

    def close_with(self, clients: Collection[str]) -> dict[str, Content]:
        """The updates to commit, by client; refused unless there are any and all of them are in."""
        if not clients:
            raise UpdateRefused(
                "empty",
                f"round {self.number} of run '{self.run}' has no update that counts, so no version is made:"
                " open it again, and wait for one",
            )
        missing = sorted(set(clients) - self._accepted.keys())
        if missing:
            raise UpdateRefused(
                "missing", f"round {self.number} of run '{self.run}' has no update of: {', '.join(missing)}"
            )
        return {client: self._accepted[client] for client in sorted(clients)}


def _by_task(participants: Iterable[Participant]) -> dict[tuple[str, int], Participant]:
    return {(each.client, each.round_num): each for each in participants}


def checked(report: Report, spec: ModelSpec, participant: Participant) -> Report:
    """The report as it counts, with the weight from the client's join; refused if it cannot be true."""
    if objection := objection_to_report(report, spec, participant):
        raise UpdateRefused("report", f"the report of client '{participant.client}': {objection}")
    return weighed(report, participant)


@dataclass(frozen=True)
class Closed:
    """What a round made."""

    model: Tensors
    state: Tensors
    """Server-side tensors, of the strategy and of ``[server]``."""
    global_importance: dict[str, float]
    """Squared change of each tensor."""
    num_clients: dict[str, int]
    """Clients that trained each tensor."""


class RoundFold:
    """The fold of one round on one aggregator; with shards, ``spec`` holds only this shard's tensors."""

    def __init__(
        self,
        strategy: Strategy,
        spec: ModelSpec,
        protection: Protection | None = None,
        start: RoundStart | None = None,
        server: Server | None = None,
    ) -> None:
        """With a ``protection`` or a ``server``, ``start`` says what they must know of the round."""
        statistics = frozenset(t.name for t in spec.tensors if t.role is Role.BUFFER)
        self._steps = ServerSteps(server or Server(), start.round_num if start else 0, statistics)
        self._spec = masked_spec(spec) if start and start.comes_masked else spec
        self._fold = protected_fold(strategy, spec, protection or Protection(), start)
        self._num_clients = {t.name: 0 for t in spec.tensors}
        self.clients: set[str] = set()

    def add(self, update: Update) -> None:
        """Fold an update in; ``UpdateRefused`` leaves everything as it was."""
        client = update.report.client
        if client in self.clients:
            raise UpdateRefused("duplicate", f"client '{client}' is already in this round")
        self._check(update)
        self._fold.add(update)
        self.clients.add(client)
        for name in update.patches:
            self._num_clients[name] += 1

    def invite(self, clients: Collection[str]) -> None:
        """These got a task: what secure aggregation has to know before any update."""
        if isinstance(self._fold, SecureFold):
            self._fold.invite(clients)

    def unmask(self, secrets: Opened) -> None:
        """What the clients of secure aggregation revealed; called once, before ``finish``."""
        if isinstance(self._fold, MaskedFold):
            self._fold.unmask(secrets)

    def drop(self, update: Update) -> None:
        """The client is gone before it could send this update, but after it named its tensors."""
        if isinstance(self._fold, SecureFold):
            self._fold.drop(update.report.client, list(update.patches))

    def _check(self, update: Update) -> None:
        for name, patch in update.patches.items():
            spec = self._spec.by_name.get(name)
            if spec is None:
                raise UpdateRefused("unknown_tensor", f"the model has no tensor '{name}'")
            if patch.values.dtype != spec.dtype:
                raise UpdateRefused("dtype", f"tensor '{name}' is {patch.values.dtype}, not {spec.dtype}")
            if patch.where is None and patch.values.shape != spec.shape:
                raise UpdateRefused("shape", f"tensor '{name}' is {patch.values.shape}, not {spec.shape}")

    def finish(self, model: Tensors, state: Tensors) -> Closed:
        """The next model; a caller may finish tensor by tensor, handing the state on.

        Raises ``VersionRefused`` if a value of it is not finite.
        """
        # What overflows is not warned about but refused.
        with np.errstate(all="ignore"):
            folded = self._steps.finish(self._fold, model, state)
            change = global_change(folded.model, model)
        # The squares of a tensor that is not finite have no finite sum: most tensors need no second look.
        doubtful = {name: new for name, new in folded.model.items() if not math.isfinite(change[name])}
        _check_finite(doubtful, model)
        _check_finite(folded.state, state)
        fold = self._fold
        summed = fold.num_clients if isinstance(fold, SecureFold | MaskedFold) else self._num_clients
        num_clients = {tensor: summed.get(tensor, 0) for tensor in model}
        return Closed(folded.model, folded.state, change, num_clients)


def _check_finite(new: Tensors, old: Tensors) -> None:
    for name, values in new.items():
        if values is not old.get(name) and not np.isfinite(values).all():
            raise VersionRefused(
                "not_finite",
                f"tensor '{name}' of the next version would not be finite, although every update was: the old "
                "version stays; lower the learning rate, or bound each change ([protection] clip_norm)",
            )
