"""The audit of one run: reads what every server keeps of it, and holds each against the others."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from fedel.audit import job_method
from fedel.audit.books import Books, check_records, read_database, read_directory, unknown_rounds
from fedel.audit.findings import DIFFERS, ILLEGAL, MISSING, TWICE, Finding, Findings
from fedel.audit.recompute import Recomputed, recompute
from fedel.audit.shard_files import ShardFiles, read_shard
from fedel.audit.windows import check_windows
from fedel.errors import ServiceError
from fedel.files import safe_name


@dataclass(frozen=True)
class Sources:
    """Where a run is kept."""

    run: str
    aggregators: tuple[Path, ...] = ()
    """Data directories, in the order of the shards."""
    database_url: str = ""
    directory: Path | None = None
    """The run's directory, with ``rounds.jsonl``."""
    run_code: bool = False
    """Whether the method may run here if it came with the job."""


@dataclass(frozen=True)
class Audit:
    """What came of it. ``findings`` is empty if the run is sound."""

    run: str
    num_rounds: int = 0
    """Records of rounds that were read."""
    num_aggregators: int = 0
    num_versions: int = 0
    """Versions on disk, on all aggregators."""
    num_tensors: int = 0
    """Tensors whose checksum was verified."""
    num_updates: int = 0
    """Updates of closed rounds that were read."""
    newest_version: int = 0
    num_recomputed: int = 0
    """Versions that every aggregator's updates make again, with the same bits."""
    findings: tuple[Finding, ...] = ()
    recomputed: frozenset[int] = field(default=frozenset())

    @property
    def sound(self) -> bool:
        return not self.findings


def audit(sources: Sources) -> Audit:
    """Everything is only read. The servers must not work on it meanwhile."""
    findings = Findings()
    with ExitStack() as stack:
        for data_dir in sources.aggregators:
            stack.enter_context(_unused(data_dir))
        books = read_database(sources.database_url, sources.run, findings) if sources.database_url else None
        if sources.directory is not None:
            books = read_directory(sources.directory, books, findings)
        stack.enter_context(
            job_method.known(sources.run, sources.aggregators, books, sources.run_code, findings)
        )
        folders = [data_dir / "runs" / safe_name(sources.run) for data_dir in sources.aggregators]
        read = [read_shard(folder, sources.run, findings) for folder in folders]
        shards = [shard for shard in read if shard is not None]
        made = [recompute(shard, findings) for shard in shards]
        if books is not None:
            check_records(books, findings)
            unknown_rounds(books, findings)
            check_windows(books, findings)
    for shard, again in zip(shards, made, strict=True):
        _check_counted_once(shard, findings)
        if books is not None:
            _check_against_records(shard, again, books, findings)
    _check_shards(shards, books, findings)
    complete = len(shards) == len(folders)
    recomputed = frozenset.intersection(*(frozenset(m.versions) for m in made)) if made and complete else None
    return Audit(
        run=sources.run,
        num_rounds=len(books.records) if books is not None else 0,
        num_aggregators=len(folders),
        num_versions=sum(len(shard.on_disk) for shard in shards),
        num_tensors=sum(shard.num_tensors for shard in shards),
        num_updates=sum(len(updates) for shard in shards for updates in shard.updates.values()),
        newest_version=max((shard.newest for shard in shards), default=0),
        num_recomputed=len(recomputed or ()),
        findings=tuple(findings.all),
        recomputed=recomputed or frozenset(),
    )


@contextmanager
def _unused(data_dir: Path) -> Iterator[None]:
    """Holds the lock that an aggregator takes."""
    if not data_dir.is_dir():
        raise ServiceError(f"{data_dir}: there is no such folder; name the data_dir of an aggregator")
    path = data_dir / "lock"
    if not path.exists():
        yield
        return
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            raise ServiceError(
                f"{data_dir}: an aggregator is using it; stop it first, or audit a copy of the folder"
            ) from None
        yield


def _check_counted_once(shard: ShardFiles, findings: Findings) -> None:
    seen: dict[tuple[str, int], int] = {}
    for version, meta in sorted(shard.metas.items()):
        for client, content in meta.counted.items():
            key = (client, content.round_num)
            if key in seen:
                what = f"the update of client '{client}' of round {content.round_num} also counts in version"
                findings.add(TWICE, shard.meta_paths[version], f"{what} {seen[key]}")
            seen[key] = version


def _check_against_records(shard: ShardFiles, again: Recomputed, books: Books, findings: Findings) -> None:
    for version, meta in sorted(shard.metas.items()):
        record = books.records.get(version - 1)
        if version == 0 or record is None:
            if version > 0 and (books.row is None or books.ended):
                what = f"there is no record of the round that made version {version} of {shard.folder}"
                findings.add(MISSING, books.at(version - 1), what)
            continue
        where, counted = shard.meta_paths[version], {entry.client for entry in record.clients}
        if counted != meta.counted.keys():
            names = ", ".join(sorted(counted ^ meta.counted.keys()))
            findings.add(DIFFERS, where, f"counts other clients than {books.at(version - 1)}: {names}")
        for entry in record.clients:
            kept = shard.updates.get(version - 1, {}).get(entry.client)
            if kept is not None:
                report = kept.update.report
                window = (report.window.end, report.window.front) if report.window else None
                said = (entry.window, entry.selected, entry.num_samples, entry.loss)
                if (window, report.selected, report.num_samples, report.loss) != said:
                    what = f"what it says about client '{entry.client}' is not what {kept.path} says"
                    findings.add(DIFFERS, books.at(version - 1), what)
        trained = again.num_clients.get(version, {})
        if any(record.tensor_clients.get(name, 0) != number for name, number in trained.items()):
            what = f"it counts other clients per tensor than the updates in {shard.folder}"
            findings.add(DIFFERS, books.at(version - 1), what)
    handover = books.handover
    if handover is not None and handover.round_num in again.versions:
        importance = again.importance[handover.round_num]
        if any(handover.global_importance.get(name) != value for name, value in importance.items()):
            what = f"the importance of tensors is not the change that version {handover.round_num} made"
            findings.add(DIFFERS, f"{books.where}, table runs", what)


def _check_shards(shards: Sequence[ShardFiles], books: Books | None, findings: Findings) -> None:
    """The aggregators of a run keep all its tensors, each once, and count the same clients."""
    if books is not None and books.spec is not None and books.row is not None:
        kept = [t.name for shard in shards for t in shard.spec.tensors]
        missing = [t.name for t in books.spec.tensors if t.name not in kept]
        if missing and len(shards) == books.row.num_shards:
            findings.add(MISSING, books.where, f"no aggregator keeps tensor '{missing[0]}'")
        for shard in shards:
            if books.ended and shard.newest != books.row.model_version:
                what = f"the newest version is {shard.newest}, the database says {books.row.model_version}"
                findings.add(DIFFERS, shard.folder / "versions", what)
    for first, other in pairwise(shards):
        if {t.name for t in first.spec.tensors} & {t.name for t in other.spec.tensors}:
            findings.add(ILLEGAL, other.folder, f"it keeps tensors that {first.folder} keeps too")
        for version in sorted(first.metas.keys() & other.metas.keys()):
            if first.metas[version].counted.keys() != other.metas[version].counted.keys():
                what = f"version {version} counts other clients than {first.meta_paths[version]}"
                findings.add(DIFFERS, other.meta_paths[version], what)
