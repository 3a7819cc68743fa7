"""One run on one aggregator: its open round, the updates in it, and the versions of its model.

``fedel.roles.aggregator`` decides; this module reads and writes the files and folds the updates accordingly. It
waits for no network and knows nothing of gRPC. Its methods block: each runs in a thread, one at a time per run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from fedel.errors import ServiceError, UpdateRefused
from fedel.files import TEMPORARY, write_atomic
from fedel.job import LATE_POLICIES
from fedel.roles.aggregator import Content, RoundFold, ShardRound, Upload, Verdict, checked
from fedel.strategies import build
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1.aggregator_pb2 import (
    CommitRoundResponse,
    ModelHeader,
    OpenRoundRequest,
    SealRoundResponse,
    UpdateHeader,
)
from fedel.wire import payload
from fedel.wire.codec import participant_from_pb, report_from_pb, spec_from_pb
from fedel_aggregator.journal import Journal, Part, read_update
from fedel_aggregator.kept_updates import KeptUpdates
from fedel_aggregator.protection import ProtectedFolds, protection_of
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.versions import Meta, Versions

HEADER_FILE = "run.pb"
LABELS_FILE = "labels.json"
UPDATES_FOLDER = "updates"
NUM_NEWEST_KEPT = 2
"""Clients of the open round download the newest; one that is a round late may still need the one before."""


def shard_spec(header: ModelHeader) -> ModelSpec:
    """The part of the model that this aggregator keeps; refused if the header makes no sense."""
    spec = spec_from_pb(header.spec)
    if not header.run:
        raise UpdateRefused("header", "the run has no name: give it one")
    if (header.late_policy or "refuse") not in LATE_POLICIES:
        raise UpdateRefused(
            "header",
            f"late_policy '{header.late_policy}' is unknown; choose from: {', '.join(LATE_POLICIES)}",
        )
    protection_of(header, build(json.loads(header.strategy_json)), spec)
    payload.check(header.tensors, spec)
    partial = [entry.name for entry in header.tensors if entry.where.ByteSize()]
    if partial or not header.tensors:
        raise UpdateRefused("shape", f"a first model consists of whole tensors; these are not: {partial}")
    return spec.subset({entry.name for entry in header.tensors})


def _upload(header: UpdateHeader) -> Upload:
    return Upload(header.report.client, Content(header.report.round_num, header.digest))


@dataclass(frozen=True)
class _Written:
    """A version whose tensors are written."""

    crc32: dict[str, int]
    changed: dict[str, int]
    importance: list[float]
    """Squared change of each tensor, in the model's order."""
    num_clients: list[int]
    state: Tensors


class ShardRun:
    """A run, with this aggregator's share of its tensors, as it is in its folder."""

    def __init__(self, folder: Path, recycled: RecycledFiles, keep_updates: int = 0) -> None:
        self._folder, self._recycled = folder, recycled
        self._kept = KeptUpdates(folder / UPDATES_FOLDER, keep_updates)
        self.header = ModelHeader.FromString((folder / HEADER_FILE).read_bytes())
        self.name = self.header.run
        self.spec = shard_spec(self.header)
        self._whole_spec = spec_from_pb(self.header.spec)
        self.versions = Versions(folder / "versions")
        strategy = build(json.loads(self.header.strategy_json))
        self._folds = ProtectedFolds(folder, self.header, strategy, self.spec, self.versions)
        self.versions.clean()
        if not self.versions.all():
            raise ServiceError(f"{folder}: no version of the model is left; restore the folder from a copy")
        for unfinished in folder.glob(f"*{TEMPORARY}"):
            unfinished.unlink()
        labels = folder / LABELS_FILE
        self._labels: dict[str, int] = json.loads(labels.read_text(encoding="utf-8")) if labels.exists() else {}
        self._open(self.versions.all()[-1])

    def _open(self, number: int) -> None:
        """Open a round; after a restart, with the updates that had been acknowledged."""
        takes_late = self.header.late_policy == "next"
        meta = self.versions.meta(number)
        journal = Journal(self._folder / "rounds" / f"{number:06d}", self._recycled)
        headers, plan = journal.load(), journal.plan
        self._meta, self._journal = meta, journal
        self._reports = {header.report.client: header.report for header in headers}
        self.round = ShardRound(
            self.name,
            number,
            takes_late=takes_late,
            sealed=journal.sealed,
            accepted=map(_upload, headers),
            participants=None if plan is None else map(participant_from_pb, plan.participants),
            counted_before=meta.counted,
        )
        self._fold_seconds = 0.0
        self._fold: RoundFold | None = self._fold_of(self.round.clients)
        for folder in (self._folder / "rounds").iterdir():
            if folder != journal.folder:
                self._retire(Journal(folder, self._recycled), journal if takes_late else None)

    def _retire(self, closed: Journal, successor: Journal | None) -> None:
        made = self.versions.meta_path(int(closed.folder.name) + 1)
        if not self._kept or not made.exists():
            return closed.retire(successor)
        if successor is not None:
            closed.hand_on(successor)
        return self._kept.keep(closed.folder, made)

    @property
    def version(self) -> int:
        """The newest version, which the open round starts from."""
        return self.round.number

    def _fold_of(self, clients: Collection[str]) -> RoundFold:
        """The fold of some of the updates that are in."""
        started = time.monotonic()
        fold = self._folds.empty(self.round.number)
        for client in sorted(clients):
            fold.add(self._journal.read(client, self.spec))
        self._fold_seconds += time.monotonic() - started
        return fold

    def open(self, plan: OpenRoundRequest) -> None:
        """Take updates of the planned clients. Repeated, also after the commit, it changes nothing."""
        if not self.round.is_answered(plan.round_num):
            self._journal.open(plan)
            self.round.open(map(participant_from_pb, plan.participants))

    def examine(self, header: UpdateHeader) -> Upload | None:
        """Check an update by its header, before any byte of it; ``None`` if it counts already.

        This is the expensive check, and the only one of the manifest; later steps trust what it returns.
        """
        upload = _upload(header)
        if not upload.client:
            raise UpdateRefused("header", "the report names no client: set its client")
        if payload.digest(header.tensors) != header.digest:
            raise UpdateRefused("digest", f"the digest of client '{upload.client}' does not match its manifest")
        if self.round.admit(upload) is Verdict.DUPLICATE:
            return None
        participant = self.round.participant(*upload.task)
        checked(report_from_pb(header.report), self._whole_spec, participant)
        payload.check(header.tensors, self.spec)
        return upload

    def begin(self, upload: Upload, header: UpdateHeader) -> Part | None:
        """Start to receive an update, or resume it; ``None`` if it counts already."""
        if self.round.admit(upload) is Verdict.DUPLICATE:
            return None
        counted = UpdateHeader()
        counted.CopyFrom(header)
        # The journal has what counts: the weight from the client's join, whatever its report says.
        counted.report.num_samples = self.round.participant(*upload.task).num_samples
        return self._journal.begin(upload, counted)

    def take(self, part: Part) -> bool:
        """Fold an update whose bytes are all there, and let it count; false if it counts already.

        It is folded before it is renamed: what is in the journal has always passed the fold.
        """
        if self.round.admit(part.upload) is Verdict.DUPLICATE:
            return False
        client, started = part.upload.client, time.monotonic()
        if self._fold is None:
            self._fold = self._fold_of(self.round.clients)
        try:
            self._fold.add(read_update(part.handle, part.header, part.start, self.spec))
        except UpdateRefused:
            self._journal.drop(client)
            raise
        try:
            self._journal.commit(part)
        except OSError:
            # The fold has an update that does not count: make it again, from the journal.
            self._fold = None
            raise
        self.round.accept(part.upload)
        self._reports[client] = part.header.report
        self._fold_seconds += time.monotonic() - started
        return True

    def seal(self, round_num: int) -> SealRoundResponse:
        """Take no further update of the round. Repeated, also after the commit, it gives the same answer."""
        if self.round.is_answered(round_num):
            return ParseDict(self._meta.sealed, SealRoundResponse())
        if not self.round.sealed:
            self._journal.seal()
            self.round.seal()
        return SealRoundResponse(reports=[self._reports[client] for client in self.round.clients])

    def commit(self, round_num: int, clients: Collection[str]) -> CommitRoundResponse:
        """Make the next version from these clients' updates. Repeated, it gives the same answer."""
        if self.round.is_answered(round_num):
            return ParseDict(self._meta.committed, CommitRoundResponse())
        sealed = self.seal(round_num)
        counted = self.round.close_with(clients)
        if self._fold is None or self._fold.clients != counted.keys():
            self._fold = self._fold_of(counted)
        started, version = time.monotonic(), round_num + 1
        written = self._write(version, self._fold, self.versions.read_state(round_num))
        self.versions.write_state(version, written.state)
        answer = CommitRoundResponse(
            version=version,
            tensors=[t.name for t in self.spec.tensors],
            global_importance=written.importance,
            num_clients=written.num_clients,
            fold_seconds=self._fold_seconds,
            commit_seconds=time.monotonic() - started,
        )
        self.versions.publish(
            Meta(version, written.crc32, written.changed, counted, _to_json(sealed), _to_json(answer))
        )
        # Frees the accumulator before the next round makes its own.
        self._fold = None
        self._open(version)
        self._delete_old()
        return answer

    def _write(self, version: int, fold: RoundFold, state: Tensors) -> _Written:
        """Write the next version's tensors, one at a time: the whole model is never in memory."""
        crc32, changed, importance, num_clients = {}, {}, [], []
        shapes = [(t.name, t.shape) for t in self.spec.tensors]
        with self.versions.open(version - 1) as old_file, self.versions.write(version, shapes) as writer:
            for tensor in self.spec.tensors:
                name, old = tensor.name, old_file.tensor(tensor.name)
                closed = fold.finish({name: old}, state)
                new, state = closed.model[name], closed.state
                crc32[name] = writer.put(name, new)
                importance.append(closed.global_importance[name])
                moved = importance[-1] > 0 or not _same_bits(new, old)
                changed[name] = version if moved else self._meta.changed[name]
                num_clients.append(closed.num_clients[name])
        return _Written(crc32, changed, importance, num_clients, state)

    def keep(self, version: int, label: str) -> None:
        """Keep a version under a label; the version that had the label before may then be deleted."""
        self.versions.meta(version)
        self._labels = {**self._labels, label: version}
        write_atomic(self._folder / LABELS_FILE, json.dumps(self._labels))
        self._delete_old()

    def _delete_old(self) -> None:
        """Delete the versions that are neither new, nor labelled, nor an n-th one to keep, nor where an audit
        begins."""
        every = self.header.keep_every
        for version in self.versions.all()[:-NUM_NEWEST_KEPT]:
            is_labelled = version in self._labels.values()
            is_nth = every > 0 and version % every == 0
            if not (is_labelled or is_nth or self._kept.needs(version)):
                self.versions.delete(version)


def _same_bits(new: Array, old: Array) -> bool:
    return new is old or bool(np.array_equal(new.view(np.uint32), old.view(np.uint32)))


def _to_json(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)
