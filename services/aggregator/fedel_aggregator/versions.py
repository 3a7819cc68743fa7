"""The versions of a run's model on disk: for each a safetensors file, its facts, and the strategy's tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedel.errors import UpdateRefused
from fedel.files import TEMPORARY, open_atomic, write_atomic
from fedel.roles.aggregator import Content
from fedel.types import Array, Tensors
from fedel_aggregator.tensor_file import Shapes, TensorFile, TensorWriter


@dataclass(frozen=True)
class Meta:
    """The facts about a version. A version exists once this is on disk."""

    version: int
    crc32: dict[str, int]
    changed: dict[str, int]
    """The version in which each tensor got its current bits."""
    counted: dict[str, Content] = field(default_factory=dict)
    """The updates that made it, by client."""
    sealed: dict[str, Any] = field(default_factory=dict)
    """The answer to SealRound of the round that made it."""
    committed: dict[str, Any] = field(default_factory=dict)
    """The answer to CommitRound."""


def read_meta(path: Path) -> Meta:
    table = json.loads(path.read_text(encoding="utf-8"))
    table["counted"] = {client: Content(*entry) for client, entry in table["counted"].items()}
    return Meta(**table)


class Versions:
    """The versions of one run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def all(self) -> list[int]:
        return sorted(int(path.stem) for path in self._folder.glob("[0-9]*.json"))

    def path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.safetensors"

    def meta_path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.json"

    def state_path(self, version: int) -> Path:
        return self._folder / f"{version:06d}.state.safetensors"

    def meta(self, version: int) -> Meta:
        try:
            return read_meta(self.meta_path(version))
        except FileNotFoundError:
            raise self._missing(version) from None

    def open(self, version: int) -> TensorFile:
        try:
            return TensorFile(self.path(version))
        except FileNotFoundError:
            raise self._missing(version) from None

    def _missing(self, version: int) -> UpdateRefused:
        kept = ", ".join(map(str, self.all())) or "none"
        return UpdateRefused("unknown_version", f"version {version} is not kept here; these are: {kept}")

    @contextmanager
    def write(self, version: int, shapes: Shapes) -> Iterator[TensorWriter]:
        """Write the tensors of a new version, which exists only after ``publish``."""
        with open_atomic(self.path(version)) as file:
            yield TensorWriter(file.fileno(), shapes)

    def write_state(self, version: int, state: Tensors) -> None:
        """Write the strategy's own tensors, if it has any."""
        if not state:
            return
        names = sorted(state)
        with open_atomic(self.state_path(version)) as file:
            writer = TensorWriter(file.fileno(), [(name, state[name].shape) for name in names])
            for name in names:
                writer.put(name, state[name])

    def read_state(self, version: int) -> dict[str, Array]:
        if not self.state_path(version).exists():
            return {}
        with TensorFile(self.state_path(version)) as file:
            return {name: file.tensor(name) for name in file.places}

    def publish(self, meta: Meta) -> None:
        """From here on the version, whose tensors are written, exists."""
        write_atomic(self.meta_path(meta.version), json.dumps(asdict(meta)))

    def delete(self, version: int) -> None:
        # The meta file first: a version without its tensors must never seem to exist.
        for path in (self.meta_path(version), self.state_path(version), self.path(version)):
            path.unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove what a crash left unfinished."""
        kept = {f"{version:06d}" for version in self.all()}
        for path in self._folder.iterdir():
            if path.name.endswith(TEMPORARY) or path.name.split(".")[0] not in kept:
                path.unlink()
