"""A run's directory: everything after each closed round is on disk, so that a run can be stopped and go on.

The state of a round is complete when ``state/state.json`` is renamed into place; files of a round that did not
get so far are ignored and overwritten.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from fedel import config
from fedel.errors import ConfigError
from fedel.files import write_atomic
from fedel.records import Origin, RoundRecord
from fedel.roles.planner import Handover, memory_of
from fedel.serialisation import from_json, to_json
from fedel.simulation.job import SimulationConfig
from fedel.strategies.server_steps import averages
from fedel.types import Array, Memory, Tensors

_FREE_TO_CHANGE = ("rounds.num_rounds",)
"""Settings that may change when a run goes on."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run between two rounds."""

    model: Tensors
    handover: Handover = field(default_factory=Handover)
    fold_state: Tensors = field(default_factory=dict)
    """Server-side tensors, of the strategy and of ``[server]``."""
    memories: Mapping[str, Memory] = field(default_factory=dict)
    """Of the last round that each client counted in."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Tensor -> the round whose end gave it its values; absent: never changed."""
    held: Mapping[str, Array] = field(default_factory=dict)
    """Client -> for each tensor, in forward order, the round in which it last downloaded it; -1: never."""
    untrained_rounds: Mapping[str, int] = field(default_factory=dict)
    """Rounds since each tensor was last trained."""


@dataclass(frozen=True)
class _Saved:
    """``state.json``: a checkpoint without its tensors."""

    state: Handover
    with_tensors: list[str]
    """Clients whose memory has tensors."""
    has_fold_state: bool
    versions: Mapping[str, int]
    held: Mapping[str, int | list[int]]
    """One number where it is the same for all tensors."""
    untrained_rounds: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether only this process works on the run; the lock is released when the process ends, in any way."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path / "state"

    def check(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Raise ConfigError if the run cannot start or go on here."""
        if not (self.path / "config.toml").exists():
            return
        if not resume:
            if not self.records():  # it failed before its first round was over, and may begin again
                return
            raise ConfigError(
                f"{self.path} holds a run already; continue it (--resume, in Python resume=True), choose "
                "another name (--name, name=), or delete it"
            )
        stored = config.read(self.path / "config.toml")
        at_default = SimulationConfig.defaults(settings["strategy"])
        check_same(stored, settings, self.path, at_default, _FREE_TO_CHANGE)

    def open(self, settings: Mapping[str, Any]) -> Checkpoint | None:
        """Start a run, or read its state if it has closed a round before."""
        write_atomic(self.path / "config.toml", config.write(settings))
        try:
            checkpoint = self._load()
        except (OSError, ValueError, KeyError, SafetensorError, ConfigError) as error:
            raise ConfigError(
                f"{self._state}: what the run left is damaged ({error}); start again with another --name"
            ) from error
        self._trim_records(checkpoint.handover.round_num if checkpoint else 0)
        return checkpoint

    def note(self, origin: Origin | None) -> None:
        """Keep where the first model came from: the file may be gone when the run goes on."""
        (self.path / "origin.json").unlink(missing_ok=True)
        if origin:
            write_atomic(self.path / "origin.json", origin.to_json())

    def origin(self) -> Origin | None:
        file = self.path / "origin.json"
        return Origin.from_json(file.read_bytes(), str(file)) if file.exists() else None

    def commit(self, checkpoint: Checkpoint, record: RoundRecord) -> None:
        """The end of a round: first its files, then the one that says that it is over."""
        handover, round_num = checkpoint.handover, checkpoint.handover.round_num
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(record.to_json() + "\n")
        write_atomic(self._model_file(round_num), save(dict(checkpoint.model)))
        if checkpoint.fold_state:
            write_atomic(self._fold_file(round_num), save(dict(checkpoint.fold_state)))
        with_tensors = sorted(client for client, m in checkpoint.memories.items() if m.tensors)
        for client in {entry.client for entry in record.clients} & set(with_tensors):
            path = self._memory_file(client, handover.accepted_round(client))
            write_atomic(path, save(dict(checkpoint.memories[client].tensors)))
        saved = _Saved(
            handover,
            with_tensors,
            bool(checkpoint.fold_state),
            checkpoint.versions,
            {client: _shortened(held) for client, held in checkpoint.held.items()},
            checkpoint.untrained_rounds,
        )
        write_atomic(self._state / "state.json", to_json(saved))
        self._forget(checkpoint)

    def keep(self, name: str, checkpoint: Checkpoint) -> None:
        """Keep the committed model under its own name; its average, where the run has one."""
        if averaged := averages(checkpoint.fold_state):
            write_atomic(self.path / name, save({**checkpoint.model, **averaged}))
            return
        file, part = self._model_file(checkpoint.handover.round_num), self.path / f".{name}.part"
        part.unlink(missing_ok=True)
        try:
            os.link(file, part)
        except OSError:  # a file system without links
            shutil.copyfile(file, part)
        part.replace(self.path / name)

    def records(self) -> list[RoundRecord]:
        """The rounds closed so far, without what a crash left of a line at the end."""
        file = self.path / "rounds.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        return [
            RoundRecord.from_json(line, f"{file}, line {number}")
            for number, line in enumerate(lines, start=1)
            if line.endswith("\n")
        ]

    def _load(self) -> Checkpoint | None:
        file = self._state / "state.json"
        if not file.exists():
            return None
        saved = from_json(_Saved, file.read_bytes(), str(file))
        handover, round_num = saved.state, saved.state.round_num
        memories = {client: memory_of(report) for client, report in handover.reports.items()}
        for client in saved.with_tensors:
            tensors = load_file(self._memory_file(client, handover.accepted_round(client)))
            memories[client] = replace(memories[client], tensors=tensors)
        model = load_file(self._model_file(round_num))
        held = {client: np.full(len(model), versions, np.int32) for client, versions in saved.held.items()}
        return Checkpoint(
            model,
            handover,
            load_file(self._fold_file(round_num)) if saved.has_fold_state else {},
            memories,
            saved.versions,
            held,
            saved.untrained_rounds,
        )

    def _trim_records(self, num_rounds: int) -> None:
        kept = [record.to_json() + "\n" for record in self.records() if record.round < num_rounds]
        write_atomic(self.path / "rounds.jsonl", "".join(kept))

    def _forget(self, checkpoint: Checkpoint) -> None:
        """Delete files of earlier rounds that are not in use any more."""
        round_num = checkpoint.handover.round_num
        wanted = {self._model_file(round_num), self._fold_file(round_num)}
        for client, memory in checkpoint.memories.items():
            if memory.tensors:
                wanted.add(self._memory_file(client, checkpoint.handover.reports[client].round_num))
        for file in self._state.glob("*.safetensors"):
            if file not in wanted:
                file.unlink()

    def _model_file(self, round_num: int) -> Path:
        return self._state / f"model-{round_num}.safetensors"

    def _fold_file(self, round_num: int) -> Path:
        return self._state / f"fold-{round_num}.safetensors"

    def _memory_file(self, client: str, round_num: int) -> Path:
        return self._state / f"memory-{client}-{round_num}.safetensors"


def _shortened(held: Array) -> int | list[int]:
    numbers: list[int] = held.tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers


def check_same(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    path: Path,
    at_default: Mapping[str, Any],
    free: Collection[str] = (),
) -> None:
    """Raise ConfigError if a run would go on with another setting, unless that is ``free`` to change."""
    tables = (before, now, at_default)
    was, wanted, defaults = (dict(config.leaves(json.loads(json.dumps(table)))) for table in tables)
    # A setting that the release which started the run did not have yet was at its default.
    was |= {key: defaults[key] for key in wanted.keys() & defaults.keys() - was.keys()}
    for key in sorted(was.keys() | wanted.keys()):
        if key not in free and was.get(key) != wanted.get(key):
            raise ConfigError(
                f"{path}: cannot go on with {key} = {wanted.get(key)!r}, the run was started with "
                f"{was.get(key)!r}; set it back, or start a new run with another --name"
            )
