"""Computes the versions of one aggregator again, from the updates that counted, and compares every bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from fedel_aggregator.protection import SECRET_FILE, ProtectedFolds, protection_of
from fedel_aggregator.run_header import strategy_of

from fedel import checksum
from fedel.audit.findings import DIFFERS, MISSING, Findings
from fedel.audit.shard_files import ShardFiles
from fedel.roles.aggregator import RoundFold
from fedel.types import Array, Tensors


@dataclass
class Recomputed:
    """What came of it."""

    versions: set[int] = field(default_factory=set)
    """Computed again, with the same bits."""
    num_clients: dict[int, dict[str, int]] = field(default_factory=dict)
    """By version: clients that trained each tensor."""
    importance: dict[int, dict[str, float]] = field(default_factory=dict)
    """By version: squared change of each tensor."""


def recompute(shard: ShardFiles, findings: Findings) -> Recomputed:
    """From each version on disk onwards as far as all updates are there."""
    found = Recomputed()
    strategy = strategy_of(shard.header)
    secret = shard.folder / SECRET_FILE
    if protection_of(shard.header, strategy, shard.spec).noise_multiplier and not secret.exists():
        findings.add(MISSING, secret, "without it the noise of no round can be computed again")
        return found
    folds = ProtectedFolds(shard.folder, shard.header, strategy, shard.spec, shard.versions)
    model: Tensors | None = None
    state: Tensors = {}
    earlier: dict[int, Tensors] = {}
    """Computed versions, from which clients may have started whose updates are late."""

    def version_of(number: int) -> Tensors:
        return earlier[number] if number in earlier else shard.tensors(number)

    for round_num in sorted(shard.updates):
        version, meta = round_num + 1, shard.metas.get(round_num + 1)
        if round_num not in found.versions:
            model = None  # what was computed before is of another round, or wrong
        if model is None and round_num in shard.sound:
            model, state = shard.tensors(round_num), shard.versions.read_state(shard.metas[round_num])
        updates = shard.updates[round_num]
        if model is None or meta is None or not meta.counted.keys() <= updates.keys():
            model = None
            continue
        fold = folds.empty(round_num, model)
        kept_from = round_num - folds.staleness.max_rounds
        earlier = {number: each for number, each in earlier.items() if number >= kept_from}
        earlier[round_num] = model
        with findings.reading(shard.folder, f"the updates of round {round_num} cannot be folded"):
            for client in sorted(meta.counted):
                fold.add(folds.ready(updates[client].update, round_num, version_of))
            if folds.comes_masked:
                fold.unmask(shard.opened(round_num))
            model, state = _finish(shard, fold, model, state, version, found)
            if _same(shard, version, model, state, findings):
                found.versions.add(version)
    return found


def _finish(
    shard: ShardFiles, fold: RoundFold, model: Tensors, state: Tensors, version: int, found: Recomputed
) -> tuple[Tensors, Tensors]:
    """Tensor by tensor, as the aggregator does it."""
    new: dict[str, Array] = {}
    for tensor in shard.spec.tensors:
        closed = fold.finish({tensor.name: model[tensor.name]}, state)
        new[tensor.name], state = closed.model[tensor.name], closed.state
        found.importance.setdefault(version, {})[tensor.name] = closed.global_importance[tensor.name]
        found.num_clients.setdefault(version, {})[tensor.name] = closed.num_clients[tensor.name]
    return new, state


def _same(shard: ShardFiles, version: int, model: Tensors, state: Tensors, findings: Findings) -> bool:
    """With the version on disk if it is there, else with its checksums."""
    meta, is_sound = shard.metas[version], version in shard.sound
    where = shard.versions.path(version) if version in shard.on_disk else shard.meta_paths[version]
    disk = shard.tensors(version) if is_sound else {}
    same = True
    for name, values in model.items():
        bits = np.ascontiguousarray(values, "<f4").tobytes()
        if checksum.crc32(bits) != meta.crc32[name] or (is_sound and bits != disk[name].tobytes()):
            findings.add(
                DIFFERS, where, f"tensor '{name}' of version {version} is not what the updates on disk make"
            )
            same = False
    if is_sound and not _same_state(shard, version, state):
        path = shard.versions.state_path(version)
        findings.add(DIFFERS, path, f"the method's own tensors of version {version} are not what rounds make")
        same = False
    return same


def _same_state(shard: ShardFiles, version: int, state: Tensors) -> bool:
    disk = shard.versions.read_state(shard.metas[version])
    return disk.keys() == state.keys() and all(
        disk[name].tobytes() == np.ascontiguousarray(state[name], "<f4").tobytes() for name in disk
    )
