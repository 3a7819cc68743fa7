"""The files of a run on one aggregator, every one of them read and every checksum verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fedel_aggregator.errors import Damaged
from fedel_aggregator.journal import UNMASK_FILE, open_update, read_update
from fedel_aggregator.kept_updates import META_FILE, KeptUpdates
from fedel_aggregator.protection import staleness_of, upload_of
from fedel_aggregator.run import LABELS_FILE, NUM_NEWEST_KEPT, UPDATES_FOLDER
from fedel_aggregator.run_header import HEADER_FILE, shard_spec
from fedel_aggregator.tensor_file import TensorFile
from fedel_aggregator.versions import Meta, Versions, read_meta

from fedel.audit.findings import DAMAGED, DIFFERS, ILLEGAL, MISSING, Findings
from fedel.core.secure_server import Opened
from fedel.errors import FedelError
from fedel.files import safe_name
from fedel.serialisation import parse_json
from fedel.strategies.masked_fold import masked_spec
from fedel.types import Array, ModelSpec, SentUpdate
from fedel.v1.aggregator_pb2 import ModelHeader, Unmask
from fedel.wire import payload
from fedel.wire.codec import spec_from_pb
from fedel.wire.secure_codec import opened_from_pb


@dataclass(frozen=True)
class KeptUpdate:
    """An update on disk, sound in itself."""

    path: Path
    update: SentUpdate
    digest: str


@dataclass
class ShardFiles:
    """What of a run could be read on one aggregator."""

    folder: Path
    header: ModelHeader
    spec: ModelSpec
    """The tensors that this aggregator keeps."""
    labels: Mapping[str, int] = field(default_factory=dict)
    metas: dict[int, Meta] = field(default_factory=dict)
    """By version: of those on disk, and of those whose updates are kept."""
    meta_paths: dict[int, Path] = field(default_factory=dict)
    sound: set[int] = field(default_factory=set)
    """Versions on disk whose tensors all are as their checksums say."""
    on_disk: set[int] = field(default_factory=set)
    updates: dict[int, dict[str, KeptUpdate]] = field(default_factory=dict)
    """By round and client: those that are kept and sound."""
    num_tensors: int = 0
    """Tensors whose checksum was verified, of versions and of updates."""

    @property
    def max_staleness(self) -> int:
        """The most rounds that an update may be late."""
        return staleness_of(self.header).max_rounds

    @property
    def update_spec(self) -> ModelSpec:
        """What updates look like."""
        secure = parse_json(self.header.protection_json or "{}").get("secure", False)
        return masked_spec(self.spec) if secure else self.spec

    def opened(self, round_num: int) -> Opened:
        """What the clients of secure aggregation revealed in a round whose updates are kept."""
        folder = KeptUpdates(self.folder / UPDATES_FOLDER, -1).path(round_num)
        unmask = Unmask.FromString((folder / UNMASK_FILE).read_bytes())
        return opened_from_pb(unmask, round_num, spec_from_pb(self.header.spec))

    @property
    def newest(self) -> int:
        return max(self.on_disk, default=-1)

    @property
    def versions(self) -> Versions:
        return Versions(self.folder / "versions", self.spec)

    def tensors(self, version: int) -> dict[str, Array]:
        crc32 = self.metas[version].crc32
        with self.versions.open(version) as file:
            return {t.name: file.tensor(t.name, crc32[t.name]) for t in self.spec.tensors}


def read_shard(folder: Path, run: str, findings: Findings) -> ShardFiles | None:
    """Everything that can be read; ``None`` if the folder holds no run that can be understood."""
    path = folder / HEADER_FILE
    shard = None
    with findings.reading(path, "the run's header cannot be read"):
        header = ModelHeader.FromString(path.read_bytes())
        shard = ShardFiles(folder, header, shard_spec(header))
    if shard is None:
        return None
    if shard.header.run != run:
        findings.add(DIFFERS, path, f"it is the header of run '{shard.header.run}', not of '{run}'")
    _read_versions(shard, findings)
    _read_labels(shard, findings)
    _read_updates(shard, findings)
    _check_expected(shard, findings)
    return shard


def _read_labels(shard: ShardFiles, findings: Findings) -> None:
    path = shard.folder / LABELS_FILE
    if not path.exists():
        return
    with findings.reading(path, "the labels of versions cannot be read"):
        table = parse_json(path.read_text(encoding="utf-8"))
        shard.labels = {str(label): int(version) for label, version in table.items()}


def _read_versions(shard: ShardFiles, findings: Findings) -> None:
    folder = shard.folder / "versions"
    if not folder.is_dir():
        findings.add(MISSING, folder, "there is no version of the model")
        return
    for path in sorted(folder.glob("[0-9]*.json")):
        version = int(path.stem)
        shard.on_disk.add(version)
        _read_meta(shard, version, path, findings)
        _read_tensors(shard, version, findings)


def _read_meta(shard: ShardFiles, version: int, path: Path, findings: Findings) -> None:
    meta = None
    with findings.reading(path, f"the facts about version {version} cannot be read"):
        meta = read_meta(path)
    if meta is None:
        return
    if meta.version != version:
        findings.add(DIFFERS, path, f"it holds the facts about version {meta.version}, not {version}")
        return
    names = {t.name for t in shard.spec.tensors}
    if meta.crc32.keys() != names or meta.changed.keys() != names:
        findings.add(DIFFERS, path, "it names other tensors than the run's header; is it of another run?")
        return
    oldest = version - 1 - shard.max_staleness
    for client, content in meta.counted.items():
        if not oldest <= content.round_num < version:
            what = f"client '{client}' counts with an update of round {content.round_num}"
            findings.add(ILLEGAL, path, f"{what}, which round {version - 1} does not take")
    if version in shard.metas and shard.metas[version] != meta:
        other = shard.meta_paths[version]
        findings.add(DIFFERS, path, f"it says other things about version {version} than {other}")
        return
    shard.metas[version], shard.meta_paths[version] = meta, path


def _read_tensors(shard: ShardFiles, version: int, findings: Findings) -> None:
    path, meta = shard.versions.path(version), shard.metas.get(version)
    sound = False
    with findings.reading(path, f"the tensors of version {version} cannot be read"), TensorFile(path) as file:
        shapes = {name: place.shape for name, place in file.places.items()}
        if shapes != {t.name: t.shape for t in shard.spec.tensors}:
            findings.add(DIFFERS, path, "its tensors are not those of the run's header")
            return
        if meta is None:
            return
        sound = True
        for name in shapes:
            shard.num_tensors += 1
            try:
                values = file.tensor(name, meta.crc32[name])
            except Damaged:
                findings.add(DAMAGED, path, f"tensor '{name}' is not what its checksum says")
                sound = False
                continue
            if not np.isfinite(values).all():
                findings.add(ILLEGAL, path, f"tensor '{name}' holds NaN or Inf")
                sound = False
    if sound:
        shard.sound.add(version)


def _read_updates(shard: ShardFiles, findings: Findings) -> None:
    """Of the rounds that are kept, and of the open one."""
    kept = KeptUpdates(shard.folder / UPDATES_FOLDER, -1)
    for round_num in kept.rounds():
        folder = kept.path(round_num)
        _read_meta(shard, round_num + 1, folder / META_FILE, findings)
        shard.updates[round_num] = _read_round(shard, folder, round_num, findings)
        _check_counted(shard, folder, round_num, findings)
    for folder in sorted((shard.folder / "rounds").glob("[0-9]*")):
        _read_round(shard, folder, int(folder.name), findings)


def _read_round(shard: ShardFiles, folder: Path, round_num: int, findings: Findings) -> dict[str, KeptUpdate]:
    found: dict[str, KeptUpdate] = {}
    for path in sorted(folder.glob("*.update")):
        with findings.reading(path, "the update cannot be read"):
            if kept := _read_update(shard, path, round_num, findings):
                found[kept.update.report.client] = kept
    return found


def _read_update(shard: ShardFiles, path: Path, round_num: int, findings: Findings) -> KeptUpdate | None:
    header, start = open_update(path)
    report = header.report
    if not (header.run and report.client):
        findings.add(DAMAGED, path, "the update cannot be read: its header is not complete")
        return None
    said = f"it says it is of client '{report.client}', round {report.round_num} of run '{header.run}'"
    if header.run != shard.header.run or not 0 <= round_num - report.round_num <= shard.max_staleness:
        findings.add(DIFFERS, path, f"{said}, but it lies in round {round_num} of '{shard.header.run}'")
        return None
    if path.stem != safe_name(report.client):
        findings.add(DIFFERS, path, f"{said}, which its name does not say")
        return None
    if payload.digest(header.tensors) != header.digest:
        findings.add(DAMAGED, path, "its list of tensors is not what its digest says")
        return None
    payload.check(header.tensors, shard.update_spec, upload_of(shard.header))
    size = start + sum(entry.num_bytes for entry in header.tensors)
    if path.stat().st_size < size:
        findings.add(DAMAGED, path, f"it is cut off: {path.stat().st_size} of {size} bytes are there")
        return None
    try:
        with path.open("rb") as file:
            update = read_update(file.fileno(), header, start, shard.update_spec)
    except FedelError as error:
        findings.add(DAMAGED, path, f"a tensor is not what its checksum says ({error})")
        return None
    shard.num_tensors += len(header.tensors)
    return KeptUpdate(path, update, header.digest)


def _check_counted(shard: ShardFiles, folder: Path, round_num: int, findings: Findings) -> None:
    """Every update that counted is there, and is the one that counted."""
    meta = shard.metas.get(round_num + 1)
    for client, content in (meta.counted if meta else {}).items():
        kept, path = shard.updates[round_num].get(client), folder / f"{safe_name(client)}.update"
        if kept is None:
            if not path.exists():
                findings.add(MISSING, path, f"client '{client}' counts in round {round_num} without an update")
        elif (kept.update.report.round_num, kept.digest) != content:
            findings.add(DIFFERS, path, f"another update of client '{client}' counted in round {round_num}")


def _check_expected(shard: ShardFiles, findings: Findings) -> None:
    """Versions that the aggregator would not have deleted."""
    newest, every = max(shard.metas, default=0), shard.header.keep_every
    num_newest = max(NUM_NEWEST_KEPT, shard.max_staleness + 1)
    expected = set(range(max(0, newest + 1 - num_newest), newest + 1))
    expected |= {version for version in range(newest) if every and version % every == 0}
    for version in sorted(expected - shard.on_disk):
        findings.add(MISSING, shard.versions.meta_path(version), f"version {version} is not there")
    for label, version in shard.labels.items():
        if version not in shard.on_disk:
            where = shard.folder / LABELS_FILE
            findings.add(MISSING, where, f"version {version}, labelled '{label}', is not there")
