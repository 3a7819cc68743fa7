"""One run on one aggregator: which updates are in, what they fold to, and which version is the newest.

Nothing here waits for a network or knows gRPC; methods that touch files are called in a worker thread, one at a
time for each run. The open round has the newest version's number: version v is the model before round v.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from fedel.errors import ServiceError, UpdateRefused
from fedel.job import LATE_POLICIES
from fedel.roles.aggregator import RoundFold
from fedel.strategies import build
from fedel.types import Array, ModelSpec, Tensors
from fedel.v1.aggregator_pb2 import CommitRoundResponse, ModelHeader, SealRoundResponse, UpdateHeader
from fedel.wire import payload
from fedel.wire.codec import spec_from_pb
from fedel_aggregator.files import sync_directory, write_file
from fedel_aggregator.journal import Journal, Part, read_update
from fedel_aggregator.spares import Spares
from fedel_aggregator.store import Meta, TensorWriter, Versions

HEADER_FILE = "run.pb"
LABELS_FILE = "labels.json"
NUM_NEWEST_KEPT = 2
"""Clients of the open round fetch the newest; one that is a round late may still fetch the one before."""


@dataclass(frozen=True)
class _Written:
    """What came of writing a version's tensors."""

    crc32: dict[str, int]
    changed: dict[str, int]
    importance: list[float]
    """Squared change of each tensor, in the model's order."""
    num_clients: list[int]
    state: Tensors


def shard_spec(header: ModelHeader) -> ModelSpec:
    """The part of the model that this aggregator keeps; refused if the header makes no sense."""
    spec = spec_from_pb(header.spec)
    if not header.run:
        raise UpdateRefused("header", "a run needs a name")
    if (header.late_policy or "refuse") not in LATE_POLICIES:
        raise UpdateRefused(
            "header", f"late_policy '{header.late_policy}' is none of: {', '.join(LATE_POLICIES)}"
        )
    build(json.loads(header.strategy_json))
    payload.check(header.tensors, spec)
    partial = [entry.name for entry in header.tensors if entry.where.ByteSize()]
    if partial or not header.tensors:
        raise UpdateRefused("shape", f"a first model is made of whole tensors; these are not: {partial}")
    return spec.subset({entry.name for entry in header.tensors})


class NewRun:
    """A run's first model on its way in. The run is there once its header is on disk, at the very end."""

    def __init__(self, folder: Path, header: ModelHeader, spares: Spares) -> None:
        self._folder, self._header, self._spares = folder, header, spares
        shard_spec(header)
        shutil.rmtree(folder, ignore_errors=True)
        self._versions = Versions(folder / "versions")
        self._handle = os.open(self._versions.path(0), os.O_RDWR | os.O_CREAT, 0o644)
        self._writer = TensorWriter(
            self._handle, [(entry.name, tuple(entry.shape)) for entry in header.tensors]
        )
        self.num_bytes = sum(entry.num_bytes for entry in header.tensors)
        self.received = 0

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.received += self._writer.put_bytes(self.received, *pieces)

    def close(self) -> None:
        os.close(self._handle)

    def finish(self) -> Run:
        os.fsync(self._handle)
        with self._versions.open(0) as file:
            for entry in self._header.tensors:
                values = file.tensor(entry.name)
                payload.unpack(entry, values.reshape(-1).view(np.uint8).data, values.shape)
                if not np.isfinite(values).all():
                    raise UpdateRefused(
                        "not_finite", f"tensor '{entry.name}' of the first model holds NaN or Inf"
                    )
        crc32 = {entry.name: entry.crc32 for entry in self._header.tensors}
        self._versions.publish(Meta(0, crc32, dict.fromkeys(crc32, 0)))
        (self._folder / "rounds").mkdir(exist_ok=True)
        write_file(self._folder / HEADER_FILE, self._header.SerializeToString(deterministic=True))
        sync_directory(self._folder.parent)
        return Run(self._folder, self._spares)


class Run:
    """A run as its folder tells it."""

    def __init__(self, folder: Path, spares: Spares) -> None:
        self._folder, self._spares = folder, spares
        self.header = ModelHeader.FromString((folder / HEADER_FILE).read_bytes())
        self.name = self.header.run
        self.spec = shard_spec(self.header)
        self._strategy = build(json.loads(self.header.strategy_json))
        self.versions = Versions(folder / "versions")
        self.versions.clean()
        if not self.versions.all():
            raise ServiceError(f"{folder}: the run has no version of its model left; restore it from a copy")
        self._labels: dict[str, int] = self._read_labels()
        self._open(self.versions.all()[-1])

    def _read_labels(self) -> dict[str, int]:
        path = self._folder / LABELS_FILE
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def _open(self, round_num: int) -> None:
        """Take up a round: after a restart with the updates that had been acknowledged."""
        self.version = round_num
        self.meta = self.versions.meta(round_num)
        self.journal = Journal(self._folder / "rounds" / f"{round_num:06d}", self._spares)
        self.sealed = self.journal.sealed
        self.headers: dict[str, UpdateHeader] = {h.report.client: h for h in self.journal.headers()}
        self.fold_seconds = 0.0
        self._fold: RoundFold | None = self._folded(self.headers)
        for folder in (self._folder / "rounds").iterdir():
            if folder != self.journal.folder:
                Journal(folder, self._spares).retire(self.journal if self._counts_late else None)

    @property
    def _counts_late(self) -> bool:
        return self.header.late_policy == "next"

    def _folded(self, clients: Collection[str]) -> RoundFold:
        """The fold of some of the updates that are in."""
        started = time.monotonic()
        fold = RoundFold(self._strategy, self.spec)
        for client in sorted(clients):
            fold.add(self.journal.read(client, self.spec))
        self.fold_seconds += time.monotonic() - started
        return fold

    def admit(self, header: UpdateHeader) -> bool:
        """Whether the update is in already; refused if it cannot be taken."""
        client, key = header.report.client, (header.report.round_num, header.digest)
        if not client:
            raise UpdateRefused("header", "an update needs its client's name in its report")
        if payload.digest(header.tensors) != header.digest:
            raise UpdateRefused("digest", f"the digest of client '{client}' is not that of its manifest")
        there = self.headers.get(client)
        taken = [self.meta.counted[client]] if client in self.meta.counted else []
        taken += [(there.report.round_num, there.digest)] if there else []
        if key in taken:
            return True
        if any(round_num == key[0] for round_num, _ in taken):
            raise UpdateRefused("conflict", f"client '{client}' sent another update of round {key[0]} before")
        self._check_round(client, key[0])
        if there:
            raise UpdateRefused(
                "conflict", f"client '{client}' counts in round {self.version} with an update that came late"
            )
        payload.check(header.tensors, self.spec)
        return False

    def _check_round(self, client: str, round_num: int) -> None:
        if round_num > self.version:
            raise UpdateRefused(
                "early", f"round {round_num} of run '{self.name}' is not open yet: {self.version} is"
            )
        is_next = self._counts_late and round_num in (self.version, self.version - 1)
        if is_next and self.sealed:
            raise UpdateRefused(
                "sealed", f"round {self.version} is being closed: send it again for the next one"
            )
        if (round_num < self.version or self.sealed) and not is_next:
            raise UpdateRefused(
                "late", f"round {round_num} of run '{self.name}' is closed: client '{client}' comes too late"
            )

    def begin(self, header: UpdateHeader) -> Part | None:
        """Start taking an update, or go on with it; ``None`` if it is in already."""
        return None if self.admit(header) else self.journal.begin(header)

    def take(self, part: Part) -> bool:
        """Check an update that came in whole, fold it, and let it count; false if it was in already.

        It is folded before it is renamed: what is in the journal has always passed the fold.
        """
        if self.admit(part.header):
            return False
        client, started = part.header.report.client, time.monotonic()
        if self._fold is None:
            self._fold = self._folded(self.headers)
        try:
            update = read_update(part.handle, part.header, part.start, self.spec)
            self._fold.add(update)
        except UpdateRefused:
            self.journal.drop(client)
            raise
        del update
        try:
            self.journal.commit(part)
        except OSError:
            self._fold = None
            raise
        self.headers[client] = part.header
        self.fold_seconds += time.monotonic() - started
        return True

    def seal(self, round_num: int) -> SealRoundResponse:
        """Take no further update of the round. Asked again, even after its commit, the answer is the same."""
        if round_num == self.version - 1:
            return ParseDict(self.meta.sealed, SealRoundResponse())
        self._expect(round_num)
        if not self.sealed:
            self.journal.seal()
            self.sealed = True
        return SealRoundResponse(reports=[self.headers[client].report for client in sorted(self.headers)])

    def _expect(self, round_num: int) -> None:
        if round_num != self.version:
            reason = "early" if round_num > self.version else "late"
            raise UpdateRefused(reason, f"run '{self.name}' is in round {self.version}, not in {round_num}")

    def commit(self, round_num: int, clients: Collection[str]) -> CommitRoundResponse:
        """Make the next version of these clients' updates. Asked again, the answer is the same."""
        if round_num == self.version - 1:
            return ParseDict(self.meta.committed, CommitRoundResponse())
        sealed = self.seal(round_num)
        if missing := sorted(set(clients) - self.headers.keys()):
            raise UpdateRefused("missing", f"no update of round {round_num} is here of: {', '.join(missing)}")
        fold = self._fold
        if fold is None or fold.clients != set(clients):
            fold = self._fold = self._folded(clients)
        started, version = time.monotonic(), round_num + 1
        written = self._write(version, fold, self.versions.read_state(round_num))
        self.versions.write_state(version, written.state)
        answer = CommitRoundResponse(
            version=version,
            tensors=[t.name for t in self.spec.tensors],
            global_importance=written.importance,
            num_clients=written.num_clients,
            fold_seconds=self.fold_seconds,
            commit_seconds=time.monotonic() - started,
        )
        counted = {c: (self.headers[c].report.round_num, self.headers[c].digest) for c in sorted(clients)}
        self.versions.publish(
            Meta(version, written.crc32, written.changed, counted, _to_json(sealed), _to_json(answer))
        )
        self._fold = fold = None
        self._open(version)
        self._retain()
        return answer

    def _write(self, version: int, fold: RoundFold, state: Tensors) -> _Written:
        """The next version's tensors, one at a time: no model is ever in memory."""
        crc32, changed, importance, num_clients = {}, {}, [], []
        shapes = [(t.name, t.shape) for t in self.spec.tensors]
        with self.versions.open(version - 1) as old_file, self.versions.writing(version, shapes) as writer:
            for tensor in self.spec.tensors:
                name, old = tensor.name, old_file.tensor(tensor.name)
                closed = fold.finish({name: old}, state)
                new, state = closed.model[name], closed.state
                crc32[name] = writer.put(name, new)
                importance.append(closed.global_importance[name])
                moved = importance[-1] > 0 or not _same_bits(new, old)
                changed[name] = version if moved else self.meta.changed[name]
                num_clients.append(closed.num_clients[name])
        return _Written(crc32, changed, importance, num_clients, state)

    def keep(self, version: int, label: str) -> None:
        """Keep a version under a name; the one that had the name before is let go."""
        self.versions.meta(version)
        self._labels = {**self._labels, label: version}
        write_file(self._folder / LABELS_FILE, json.dumps(self._labels).encode())
        self._retain()

    def _retain(self) -> None:
        """Delete the versions that nothing asks to keep."""
        every = self.header.keep_every
        for version in self.versions.all()[:-NUM_NEWEST_KEPT]:
            if version not in self._labels.values() and not (every and version % every == 0):
                self.versions.delete(version)


def _same_bits(new: Array, old: Array) -> bool:
    return new is old or bool(np.array_equal(new.view(np.uint32), old.view(np.uint32)))


def _to_json(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True)
