"""A run's directory: everything after each closed round is on disk, so that a run can be stopped and go on.

The state of a round is complete when ``state/state.json`` is renamed into place; files of a round that did not
get so far are ignored and overwritten.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from fedel import config
from fedel.errors import ConfigError
from fedel.roles.coordinator import RunState, memory_of
from fedel.types import Memory, Tensors

_FREE_TO_CHANGE = ("num_rounds",)
"""Settings of ``[rounds]`` that may be other ones when a run goes on."""


@dataclass(frozen=True)
class Standing:
    """Where a run stands between two rounds."""

    model: Tensors
    state: RunState = field(default_factory=RunState)
    fold_state: Tensors = field(default_factory=dict)
    """Server-side tensors of the strategy."""
    memories: Mapping[str, Memory] = field(default_factory=dict)
    """Of the last round that each client counted in."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Tensor -> the round whose end gave it its values; absent: never changed."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Client -> the round whose start it last downloaded the model at."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = path / "state"

    def check(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Raise ConfigError if the run cannot be begun here, or gone on with."""
        if not (self.path / "config.toml").exists():
            return
        if not resume:
            raise ConfigError(
                f"{self.path} holds a run already; go on with it by --resume, choose another --name, or "
                "delete it"
            )
        _check_same(config.read(self.path / "config.toml"), settings, self.path)

    def open(self, settings: Mapping[str, Any]) -> Standing | None:
        """Begin a run, or find where it stands if it has closed a round before."""
        write(self.path / "config.toml", config.write(settings).encode())
        try:
            standing = self._load()
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(
                f"{self._state}: what the run left is damaged ({error}); begin again with another --name"
            ) from error
        self._trim_records(standing.state.round_num if standing else 0)
        return standing

    def commit(self, standing: Standing, record: Mapping[str, Any]) -> None:
        """The end of a round: first everything it left, then the word that it is over."""
        round_num = standing.state.round_num
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._state.mkdir(exist_ok=True)
        write(self._model_file(round_num), save(dict(standing.model)))
        if standing.fold_state:
            write(self._state / f"fold-{round_num}.safetensors", save(dict(standing.fold_state)))
        for client, memory in standing.memories.items():
            if memory.tensors and standing.state.reports[client].round_num == round_num - 1:
                write(self._memory_file(client, round_num - 1), save(dict(memory.tensors)))
        state = {
            "state": asdict(standing.state),
            "with_tensors": sorted(client for client, m in standing.memories.items() if m.tensors),
            "has_fold_state": bool(standing.fold_state),
            "versions": dict(standing.versions),
            "held": dict(standing.held),
        }
        write(self._state / "state.json", json.dumps(state).encode())
        self._forget(standing)

    def keep(self, name: str, round_num: int) -> None:
        """Keep the model after ``round_num`` rounds under a name of its own."""
        part = self.path / f".{name}.part"
        part.unlink(missing_ok=True)
        try:
            os.link(self._model_file(round_num), part)
        except OSError:  # a file system without links
            shutil.copyfile(self._model_file(round_num), part)
        part.replace(self.path / name)

    def records(self) -> list[dict[str, Any]]:
        """The rounds closed so far; what a crash left of a line at the end is not among them."""
        file = self.path / "rounds.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def _load(self) -> Standing | None:
        file = self._state / "state.json"
        if not file.exists():
            return None
        kept = json.loads(file.read_text(encoding="utf-8"))
        state = config.parse(RunState, kept["state"], str(file))
        fold_file = self._state / f"fold-{state.round_num}.safetensors"
        memories = {client: memory_of(report) for client, report in state.reports.items()}
        for client in kept["with_tensors"]:
            tensors = load_file(self._memory_file(client, state.reports[client].round_num))
            memories[client] = replace(memories[client], tensors=tensors)
        return Standing(
            load_file(self._model_file(state.round_num)),
            state,
            load_file(fold_file) if kept["has_fold_state"] else {},
            memories,
            kept["versions"],
            kept["held"],
        )

    def _trim_records(self, num_rounds: int) -> None:
        kept = [record for record in self.records() if record["round"] < num_rounds]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        write(self.path / "rounds.jsonl", text.encode())

    def _forget(self, standing: Standing) -> None:
        """Files of earlier rounds that nothing names any more."""
        round_num = standing.state.round_num
        wanted = {self._model_file(round_num), self._state / f"fold-{round_num}.safetensors"}
        for client, memory in standing.memories.items():
            if memory.tensors:
                wanted.add(self._memory_file(client, standing.state.reports[client].round_num))
        for file in self._state.glob("*.safetensors"):
            if file not in wanted:
                file.unlink()

    def _model_file(self, round_num: int) -> Path:
        return self._state / f"model-{round_num}.safetensors"

    def _memory_file(self, client: str, round_num: int) -> Path:
        return self._state / f"memory-{client}-{round_num}.safetensors"


def write(path: Path, content: bytes) -> None:
    """The whole file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    was, wanted = (dict(_leaves(json.loads(json.dumps(table)))) for table in (before, now))
    for key in sorted(was.keys() | wanted.keys()):
        if key.removeprefix("rounds.") not in _FREE_TO_CHANGE and was.get(key) != wanted.get(key):
            raise ConfigError(
                f"{path}: cannot go on with {key} = {wanted.get(key)!r}, the run was begun with "
                f"{was.get(key)!r}; leave it, or begin a new run with another --name"
            )


def _leaves(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            found.append((prefix + key, value))
    return found
