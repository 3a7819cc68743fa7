"""One run on one aggregator: its open round, the updates in it, and the versions of its model.

``fedel.roles.aggregator`` decides; this module reads and writes the files and folds the updates accordingly. It
waits for no network and knows nothing of gRPC. Its methods block: each runs in a thread, one at a time per run.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from fedel.errors import UpdateRefused
from fedel.files import TEMPORARY, sync_directory
from fedel.roles.aggregator import Content, RoundFold, ShardRound, Upload, Verdict, checked
from fedel.roles.gate import objection_to_name
from fedel.serialisation import parse_json
from fedel.v1.aggregator_pb2 import (
    CommitRoundResponse,
    OpenRoundRequest,
    SealRoundResponse,
    Unmask,
    UpdateHeader,
)
from fedel.wire import payload
from fedel.wire.codec import participant_from_pb, report_from_pb, spec_from_pb
from fedel.wire.secure_codec import opened_from_pb
from fedel_aggregator.errors import MALFORMED, Damaged, DamagedUpdate, damaged, damaged_update
from fedel_aggregator.journal import Journal, Part, read_update
from fedel_aggregator.kept_updates import KeptUpdates
from fedel_aggregator.next_version import NextVersion
from fedel_aggregator.private_files import make_folder, write_private
from fedel_aggregator.protection import ProtectedFolds
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run_header import read_run_header, strategy_of
from fedel_aggregator.versions import Meta, Versions

LABELS_FILE = "labels.json"
ENDED_FILE = "ended"
UPDATES_FOLDER = "updates"
NUM_NEWEST_KEPT = 2
"""The newest, and the one before, which may be in test; more where updates may be more rounds late."""
MAX_REFUSED = 3
"""Updates of one client and round that the fold may refuse: after each of them it is made again."""


def _upload(header: UpdateHeader) -> Upload:
    return Upload(header.report.client, Content(header.report.round_num, header.digest), header.attempt)


class ShardRun:
    """A run, with this aggregator's share of its tensors, as it is in its folder."""

    def __init__(
        self, folder: Path, recycled: RecycledFiles, keep_updates: int = 0, *, verify: bool = False
    ) -> None:
        """``Damaged`` if a file cannot be read. ``verify`` reads all of the newest version as well."""
        self._folder, self._recycled = folder, recycled
        self._kept = KeptUpdates(folder / UPDATES_FOLDER, keep_updates)
        self.header, self.spec = read_run_header(folder)
        self.name = self.header.run
        self.whole_spec = spec_from_pb(self.header.spec)
        self.versions = Versions(folder / "versions", self.spec)
        strategy = strategy_of(self.header)
        self._folds = ProtectedFolds(folder, self.header, strategy, self.spec, self.versions)
        newest = max(self.versions.all(), default=-1)
        # The round of a version is opened after it: if there is a later one, its version is lost.
        last_round = max((int(path.name) for path in self._rounds()), default=0)
        if newest < last_round or newest < 0:
            raise damaged("run", self.versions.meta_path(last_round), "it is missing")
        with self.versions.open(newest):
            self.versions.clean()
        for unfinished in folder.glob(f"*{TEMPORARY}"):
            unfinished.unlink()
        self._labels = _read_labels(folder / LABELS_FILE)
        self._open(newest)
        if verify:
            self.versions.verify(self._meta)

    def _open(self, number: int) -> None:
        """Open a round; after a restart, with the updates that had been acknowledged."""
        ended, max_staleness = (self._folder / ENDED_FILE).exists(), self._folds.staleness.max_rounds
        meta = self.versions.meta(number)
        journal = Journal(self._folder / "rounds" / f"{number:06d}", self._recycled)
        closed = [Journal(path, self._recycled) for path in self._rounds() if path != journal.folder]
        for each in closed:
            self._hand_on(each, journal)
        plan, started = journal.plan, time.monotonic()
        headers = {header.report.client: header for header in journal.load()}
        # An ended run needs no memory for sums.
        fold = None if ended else self._fold_readable(number, journal, headers)
        self._meta, self._journal, self._fold = meta, journal, fold
        self._reports = {client: header.report for client, header in headers.items()}
        self._refused: Counter[str] = Counter()
        self._fold_seconds = time.monotonic() - started
        self.round = ShardRound(
            self.name,
            number,
            max_staleness=max_staleness,
            sealed=journal.sealed,
            ended=ended,
            accepted=map(_upload, headers.values()),
            participants=None if plan is None else map(participant_from_pb, plan.participants),
            attempt=0 if plan is None else plan.attempt,
            counted_before=self._counted_before(meta),
        )
        for each in closed:
            self._retire(each)

    def _counted_before(self, newest: Meta) -> Iterator[tuple[str, Content]]:
        """What must not count again: the updates of the rounds that a late one may be of."""
        oldest = newest.version + 1 - self._folds.staleness.max_rounds
        for version in self.versions.all():
            if oldest <= version < newest.version:
                yield from self.versions.meta(version).counted.items()
        yield from newest.counted.items()

    def _hand_on(self, closed: Journal, successor: Journal) -> None:
        """What is unfinished, or did not count because another aggregator did not have it yet, goes on in the
        next round if it would still count there."""
        version = int(closed.folder.name) + 1
        counted = self.versions.meta(version).counted if self.versions.meta_path(version).exists() else None
        closed.hand_on(successor, int(successor.folder.name) - self._folds.staleness.max_rounds, counted)

    def _retire(self, closed: Journal) -> None:
        made = self.versions.meta_path(int(closed.folder.name) + 1)
        if self._kept and made.exists():
            self._kept.keep(closed.folder, made)
        else:
            closed.retire()

    def _rounds(self) -> list[Path]:
        """The folders of rounds; what has another name is not ours."""
        make_folder(self._folder / "rounds")
        return [path for path in (self._folder / "rounds").iterdir() if re.fullmatch(r"\d{6,}", path.name)]

    @property
    def version(self) -> int:
        """The newest version, which the open round starts from."""
        return self.round.number

    def meta(self, version: int) -> Meta:
        """The facts about a version; of the newest one they are at hand."""
        newest = self._meta
        return newest if newest.version == version else self.versions.meta(version)

    def _add(self, fold: RoundFold, journal: Journal, client: str) -> None:
        """Fold an update of the journal in; ``DamagedUpdate`` if it is not what was acknowledged."""
        sent = journal.read(client, self._folds.update_spec, self._folds.upload)
        try:
            fold.add(self._folds.ready(sent, int(journal.folder.name)))
        except UpdateRefused as error:
            raise damaged_update(journal.path(client), error) from None

    def _fold_readable(self, number: int, journal: Journal, headers: dict[str, UpdateHeader]) -> RoundFold:
        """The fold of all updates of a round; those that cannot be read are taken out of ``headers``."""
        while True:
            fold = self._folds.empty(number)
            for client in sorted(headers):
                try:
                    self._add(fold, journal, client)
                except DamagedUpdate as error:
                    journal.give_up(client, error)
                    del headers[client]
                    break
            else:
                return fold

    def _fold_of(self, clients: Collection[str]) -> RoundFold:
        """The fold of some of the updates that are in."""
        started = time.monotonic()
        fold = self._folds.empty(self.round.number)
        for client in sorted(clients):
            self._add(fold, self._journal, client)
        self._fold_seconds += time.monotonic() - started
        return fold

    def open(self, plan: OpenRoundRequest) -> bool:
        """Take updates of the planned clients. False after the commit: then it changes nothing."""
        if self.round.is_answered(plan.round_num):
            return False
        self._journal.open(plan)
        if self.round.ended:
            (self._folder / ENDED_FILE).unlink(missing_ok=True)
            sync_directory(self._folder)
        if plan.attempt != self.round.attempt:
            self._fold, self._reports = None, {}
        for client in self.round.open(map(participant_from_pb, plan.participants), plan.attempt):
            self._journal.forget(client)
            self._fold = None
            del self._reports[client]
        return True

    def end(self) -> None:
        """Take no further update. Repeated, it changes nothing."""
        if not self.round.ended:
            write_private(self._folder / ENDED_FILE, b"")
            self.round.end()
            self._fold = None
            self._journal.drop_parts()

    def examine(self, header: UpdateHeader) -> Upload | None:
        """Check an update by its header, before any byte of it; ``None`` if it counts already.

        This is the expensive check, and the only one of the manifest; later steps trust what it returns.
        """
        upload = _upload(header)
        if not upload.client:
            raise UpdateRefused("header", "the report names no client: set its client")
        if payload.digest(header.tensors) != header.digest:
            raise UpdateRefused("digest", f"the digest of client '{upload.client}' does not match its manifest")
        if not self._admit(upload):
            return None
        if self._refused[upload.client] >= MAX_REFUSED:
            raise UpdateRefused(
                "conflict", f"client '{upload.client}' sent {MAX_REFUSED} updates that were refused: no more"
            )
        participant = self.round.participant(*upload.task)
        checked(report_from_pb(header.report), self.whole_spec, participant)
        payload.check(header.tensors, self._folds.update_spec, self._folds.upload)
        return upload

    def _admit(self, upload: Upload) -> bool:
        """Whether to take an update; false if it counts already.

        A sealed round is opened again if too few updates are in it. So what comes meanwhile is to come again:
        it is too late once the round's version is made. A masked update belongs to one attempt.
        """
        try:
            return self.round.admit(upload) is Verdict.TAKE
        except UpdateRefused as refusal:
            is_of_this = self.round.sealed and upload.content.round_num == self.round.number
            if refusal.reason != "late" or not is_of_this or self._folds.comes_masked:
                raise
            raise UpdateRefused(
                "sealed",
                f"round {self.round.number} of run '{self.name}' is being closed: client '{upload.client}' may"
                " still be in time if it is opened again; try again in a moment",
            ) from None

    def begin(self, upload: Upload, header: UpdateHeader) -> Part | None:
        """Start to receive an update, or resume it; ``None`` if it counts already."""
        if not self._admit(upload):
            return None
        counted = UpdateHeader()
        counted.CopyFrom(header)
        counted.DiscardUnknownFields()
        # The journal has what counts: the weight from the client's join, whatever its report says.
        counted.report.num_samples = self.round.participant(*upload.task).num_samples
        return self._journal.begin(upload, counted)

    def take(self, part: Part) -> bool:
        """Fold an update whose bytes are all there, and let it count; false if it counts already.

        It is folded before it is renamed: what is in the journal has always passed the fold.
        """
        if not self._admit(part.upload):
            return False
        client, started = part.upload.client, time.monotonic()
        try:
            sent = read_update(part.handle, part.header, part.start, self._folds.update_spec)
        except UpdateRefused:
            # Its bytes are not what was announced: the client starts again at the first.
            self._journal.drop(client)
            raise
        if self._fold is None:
            self._fold = self._fold_of(self.round.clients)
        try:
            self._fold.add(self._folds.ready(sent, self.round.number))
            self._journal.commit(part)
        except BaseException as error:
            # The fold may have an update, or a part of one, that does not count: it is made again.
            self._fold = None
            # Neither a disk nor a version that is damaged is the client's fault.
            if not isinstance(error, OSError | Damaged):
                self._refused[client] += 1
                self._journal.drop(client)
            raise
        self.round.accept(part.upload)
        self._reports[client] = part.header.report
        self._fold_seconds += time.monotonic() - started
        return True

    def seal(self, round_num: int) -> SealRoundResponse:
        """Take no further update of the round. Repeated, also after the commit, it gives the same answer."""
        if self.round.is_answered(round_num):
            return self.versions.sealed(self.version)
        if not self.round.sealed:
            self._journal.seal()
            self.round.seal()
        return SealRoundResponse(reports=[self._reports[client] for client in self.round.clients])

    def commit(
        self, round_num: int, clients: Collection[str], unmask: Unmask | None = None
    ) -> CommitRoundResponse:
        """Make the next version from these clients' updates. Repeated, it gives the same answer."""
        if self.round.is_answered(round_num):
            return self.versions.committed(self._meta)
        sealed = self.seal(round_num)
        counted = self.round.close_with(clients)
        if self._fold is None or self._fold.clients != counted.keys():
            self._fold = self._fold_of(counted)
        started, version, fold = time.monotonic(), round_num + 1, self._fold
        if self._folds.comes_masked:
            self._fold = None  # masks come off once: a commit that is repeated adds the updates up again
            self._unmask(fold, unmask)
        written = NextVersion(self.name, self.spec, self.versions, self._meta).write(fold)
        state_crc32 = self.versions.write_state(version, written.state)
        answer = CommitRoundResponse(
            version=version,
            tensors=[t.name for t in self.spec.tensors],
            global_importance=written.importance,
            num_clients=written.num_clients,
            fold_seconds=self._fold_seconds,
            commit_seconds=time.monotonic() - started,
        )
        self.versions.write_sealed(version, sealed)
        self.versions.publish(
            Meta(version, written.crc32, written.changed, counted, _to_json(answer), state_crc32)
        )
        # Frees the accumulator before the next round makes its own.
        self._fold = None
        self._open(version)
        self._delete_old()
        return answer

    def _unmask(self, fold: RoundFold, unmask: Unmask | None) -> None:
        if unmask is None or unmask.attempt != self.round.attempt:
            raise UpdateRefused(
                "masked",
                f"round {self.round.number} of run '{self.name}' has masked updates, and nothing that"
                f" takes off the masks of attempt {self.round.attempt}",
            )
        self._journal.keep_secrets(unmask)
        fold.unmask(opened_from_pb(unmask, self.round.number, self.whole_spec))

    def keep(self, version: int, label: str) -> None:
        """Keep a version under a label; the version that had the label before may then be deleted."""
        if objection := objection_to_name(label, "label"):
            raise UpdateRefused("header", objection)
        self.versions.meta(version)
        self._labels = {**self._labels, label: version}
        write_private(self._folder / LABELS_FILE, json.dumps(self._labels))
        self._delete_old()

    def _delete_old(self) -> None:
        """Delete the versions that are neither new, nor labelled, nor an n-th one to keep, nor where an audit
        begins."""
        every, versions = self.header.keep_every, self.versions.all()
        max_staleness = self._folds.staleness.max_rounds
        for version in versions[:-1]:
            self.versions.forget_answer(version)
        for version in versions[: -max(NUM_NEWEST_KEPT, max_staleness + 1)]:
            is_labelled = version in self._labels.values()
            is_nth = every > 0 and version % every == 0
            # A late update was trained from an earlier version than the one of the round in which it counts.
            is_needed = any(self._kept.needs(version + late) for late in range(max_staleness + 1))
            if not (is_labelled or is_nth or is_needed):
                self.versions.delete(version)


def _read_labels(path: Path) -> dict[str, int]:
    try:
        labels = parse_json(path.read_bytes())
        if not all(type(version) is int for version in labels.values()):
            raise ValueError("a label has no version")
    except FileNotFoundError:
        return {}
    except MALFORMED as error:
        raise damaged("labels", path, error) from None
    return labels  # type: ignore[no-any-return]


def _to_json(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)
