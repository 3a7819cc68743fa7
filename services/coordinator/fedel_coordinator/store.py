"""What the coordinator keeps: runs, clients, rounds and reports, behind a port.

Every method is one transaction, unless it is called ``together`` with others, and blocks: the service calls
them in threads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fedel.errors import ServiceError

BATCH_ROUNDS = 20
"""Records in memory at once; one with a thousand clients is a megabyte."""


class StoreUnavailable(ServiceError):
    """The database does not answer now; the call may be repeated."""


@dataclass(frozen=True)
class RunRow:
    name: str
    config_json: str
    spec_json: str
    num_shards: int
    phase: str
    created_at: float
    """Unix seconds, like every time in here."""
    message: str = ""
    ended_at: float | None = None
    state_json: str = "{}"
    """The ``Handover`` that the open round, or the next one, starts from."""
    model_version: int = 0
    best_version: int = -1
    best_accuracy: float | None = None


@dataclass(frozen=True)
class ClientRow:
    run: str
    client: str
    device_type: str
    memory_bytes: int
    agent_version: str
    num_samples: int
    can_evaluate: bool
    profile_json: str
    has_left: bool = False
    num_held_out: int = 0


@dataclass(frozen=True)
class RoundRow:
    run: str
    round_num: int
    status: str
    plan_json: str
    opened_at: float
    record_json: str = "{}"
    sealed_at: float | None = None
    secure_json: str = ""
    """With secure aggregation, between the reveal and the commit."""


@dataclass(frozen=True)
class ReportRow:
    """A finished task, as its client reported it."""

    run: str
    round_num: int
    client: str
    report_json: str
    phases_json: str
    device_json: str
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True)
class AgentRow:
    """What is known of an agent, whether it is here or not."""

    name: str
    device_type: str = ""
    memory_bytes: int = 0
    agent_version: str = ""
    protocol: int = 0
    labels_json: str = "{}"
    """The device's own."""
    operator_labels_json: str = "{}"
    """Of two labels with one key, the operator's counts."""
    cordoned: bool = False
    certificate_end: float = 0.0
    """0: it has none."""
    last_seen: float = 0.0
    """Not exact to the minute while the agent is connected."""
    up_rate: float = 0.0
    """Measured bytes per second; 0: not yet."""
    down_rate: float = 0.0
    error_at: float = 0.0
    """0: it had none."""
    error_run: str = ""
    error_round: int = -1
    error_message: str = ""
    error_trace: str = ""


@dataclass(frozen=True)
class CodeRow:
    """Code that came with a job."""

    sha256: str
    content: bytes
    """Of a ``StoredCode``."""
    stored_at: float


class Store(Protocol):
    """The port. Every method may raise ``StoreUnavailable``, which means: try again."""

    def together(self) -> AbstractContextManager[object]:
        """What this thread writes in this context is one transaction: all of it is kept, or nothing."""
        ...

    def create_run(self, row: RunRow) -> bool:
        """False if a run of this name exists already; then nothing changes."""
        ...

    def run(self, name: str) -> RunRow | None: ...

    def runs(self, brief: bool = False) -> list[RunRow]:
        """Newest first; in brief without their models and states, which are large."""
        ...

    def delete_run(self, run: str) -> None:
        """The run and everything about it; nothing if it is not there."""
        ...

    def set_phase(self, run: str, phase: str, message: str = "", ended_at: float | None = None) -> None: ...

    def put_client(self, row: ClientRow) -> None:
        """Insert or replace."""
        ...

    def set_left(self, run: str, client: str) -> None:
        """The client said goodbye."""
        ...

    def delete_client(self, run: str, client: str) -> None:
        """The run need not remember the client."""
        ...

    def clients(self, run: str) -> list[ClientRow]:
        """By name."""
        ...

    def put_round(self, row: RoundRow) -> None:
        """Insert or replace."""
        ...

    def seal_round(self, run: str, round_num: int, sealed_at: float) -> None: ...

    def open_masks(self, run: str, round_num: int, secure_json: str) -> None:
        """What takes the masks off the round's sum is known."""
        ...

    def commit_round(
        self, run: str, round_num: int, record_json: str, state_json: str, model_version: int
    ) -> None:
        """The round has made a model; the run goes on from ``state_json``. Its reports, and those of earlier
        rounds, are in the record, and nobody asks for them again."""
        ...

    def close_round(
        self, run: str, round_num: int, record_json: str, best: tuple[int, float] | None = None
    ) -> None:
        """The round's record is complete; ``best`` is a new best version and its accuracy."""
        ...

    def round(self, run: str, round_num: int) -> RoundRow | None: ...

    def last_round(self, run: str) -> RoundRow | None: ...

    def records(self, run: str, start: int = 0, limit: int = 1_000_000) -> list[str]:
        """Records of the closed rounds from ``start`` on, in order."""
        ...

    def put_report(self, row: ReportRow) -> None:
        """Insert or replace."""
        ...

    def reports(self, run: str, round_num: int) -> list[ReportRow]:
        """By client."""
        ...

    def put_code(self, row: CodeRow) -> None:
        """Insert or replace."""
        ...

    def code(self, sha256: str) -> CodeRow | None: ...

    def drop_codes(self, keep: Collection[str], before: float) -> None:
        """Delete code that was stored before this time, but for these hashes."""
        ...

    def put_agents(self, rows: Sequence[AgentRow]) -> None:
        """Insert or replace, all in one transaction."""
        ...

    def delete_agents(self, names: Sequence[str]) -> None: ...

    def agents(self) -> list[AgentRow]: ...

    def close(self) -> None: ...


def each_record(store: Store, run: str) -> Iterator[str]:
    """Of every closed round, in order; a few are in memory at a time."""
    start = 0
    while texts := store.records(run, start, BATCH_ROUNDS):
        yield from texts
        start += len(texts)
