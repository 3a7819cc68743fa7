"""What an audit found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from google.protobuf.message import DecodeError
from sqlalchemy.exc import DatabaseError

from fedel.errors import FedelError

DAMAGED = "damaged"
"""A file or a row cannot be read, or is not what its checksum says."""
MISSING = "missing"
DIFFERS = "differs"
"""Two places say different things about the same fact."""
ILLEGAL = "illegal"
"""What is written there can be read, but the rules do not allow it."""
TWICE = "twice"
"""An update counted twice."""

UNREADABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, MemoryError,
    DecodeError, DatabaseError, FedelError,
)  # fmt: skip
"""What reading a damaged file or row raises."""


@dataclass(frozen=True)
class Finding:
    kind: str
    where: str
    """The file, or the row of the database."""
    what: str

    def __str__(self) -> str:
        return f"{self.kind:8} {self.where}: {self.what}"


@dataclass
class Findings:
    """Collects them, each once, in the order in which they were found."""

    all: list[Finding] = field(default_factory=list)

    def add(self, kind: str, where: Path | str, what: str) -> None:
        finding = Finding(kind, str(where), what)
        if finding not in self.all:
            self.all.append(finding)

    def reading(self, where: Path | str, what: str) -> _Reading:
        """What cannot be read in the block is a finding, and the block ends there."""
        return _Reading(self, where, what)


@dataclass(frozen=True)
class _Reading:
    findings: Findings
    where: Path | str
    what: str

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, FileNotFoundError):
            self.findings.add(MISSING, self.where, self.what)
        elif isinstance(error, UNREADABLE):
            self.findings.add(DAMAGED, self.where, f"{self.what}: {type(error).__name__}: {error}"[:300])
        return isinstance(error, UNREADABLE)
