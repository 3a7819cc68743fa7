"""What a target of the fuzzing is: valid inputs, how they are changed, what reads them, and its limits."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

from google.protobuf.message import DecodeError, Message

from fedel.errors import FedelError

Mutator = Callable[[Random, bytes, Sequence[bytes]], bytes]
Read = Callable[[bytes], object]
CORPUS = Path(__file__).with_name("corpus")


@dataclass(frozen=True)
class Target:
    """A decoder or reader, and how to try it. All inputs are bytes: a message, or the content of a file."""

    name: str
    seeds: Callable[[], Sequence[bytes]]
    """Valid inputs, made by the project's own encoders."""
    mutate: Mutator
    prepare: Callable[[Path], Read]
    """What reads an input; it may use the folder. It returns or raises a ``FedelError``, nothing else."""
    seconds: float = 1.0
    """CPU time that one case may take."""
    megabytes: int = 256
    """Memory that one case may take beyond what the process has."""

    @cached_property
    def _seeds(self) -> tuple[bytes, ...]:
        return tuple(self.seeds())

    def case(self, seed: int, number: int) -> bytes:
        """The same for the same numbers, on every machine. The first cases are the valid inputs as they are."""
        if number < len(self._seeds):
            return self._seeds[number]
        rng = Random(f"{self.name} {seed} {number}")
        return self.mutate(rng, rng.choice(self._seeds), self._seeds)

    def kept(self) -> list[Path]:
        """Cases that once failed."""
        return sorted((CORPUS / self.name).glob("*"))


class Unreadable(FedelError):
    """Protobuf cannot parse it: servers refuse such a message before any code of ours sees it."""


def parsed(kind: type[Message], data: bytes) -> Message:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise Unreadable from None


def memory_disk() -> str | None:
    """Where temporary files cost least; ``None`` for the usual place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


_SCRATCH: list[tempfile.TemporaryDirectory[str]] = []


def scratch() -> Path:
    """A new folder that is deleted when this process ends."""
    _SCRATCH.append(tempfile.TemporaryDirectory(prefix="fuzz-"))
    return Path(_SCRATCH[-1].name)


def reads_file(name: str, read: Callable[[Path], object]) -> Callable[[Path], Read]:
    """For ``prepare``: write the input to this file of the folder, then read it."""

    def prepare(folder: Path) -> Read:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)

        def run(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return run

    return prepare
