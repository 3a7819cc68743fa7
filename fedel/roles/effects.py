"""What the round engine wants done, in order; what happened before is in ``events``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedel.core.secure_server import Opened
from fedel.core.secure_sum import Keys
from fedel.records import RoundRecord
from fedel.roles.events import Evaluated
from fedel.roles.run_state import TaskResult
from fedel.security.signed_keys import Proof
from fedel.types import Memory, Participant, Task


@dataclass(frozen=True)
class Persist:
    """Make a part of the new state durable before anything after this effect is done."""

    part: str
    """``member``, ``forgotten``, ``plan``, ``result``, ``sealed``, ``opened``, ``committed``, ``closed`` or
    ``phase``."""
    client: str = ""
    """Whose, for ``member``, ``forgotten`` and ``result``."""
    record: RoundRecord | None = None
    """For ``committed`` and ``closed``."""
    result: TaskResult | None = None
    """For ``result``."""
    best_version: int | None = None
    """For ``closed``: the version that is the best so far, if the round made it."""


@dataclass(frozen=True)
class Open:
    """Have the aggregators take updates of the round, from these clients only."""

    round_num: int
    participants: tuple[Participant, ...]
    attempt: int = 0
    """With secure aggregation: updates of an earlier attempt are discarded."""


@dataclass(frozen=True)
class SendTask:
    task: Task
    accepted_round: int
    memory: Memory
    deadline_seconds: float
    """Left until the deadline."""
    attempt: int = 0
    """Of secure aggregation."""


@dataclass(frozen=True)
class SendRoster:
    """Secure aggregation: tell a client who takes part; it answers with Shared."""

    client: str
    round_num: int
    attempt: int
    keys: Mapping[str, Keys]
    named: Mapping[str, tuple[str, ...]]
    proofs: Mapping[str, Proof]


@dataclass(frozen=True)
class SendGroup:
    """Secure aggregation: send a client the shares of the others, with whom it masks its update."""

    client: str
    round_num: int
    attempt: int
    shares: Mapping[str, bytes]


@dataclass(frozen=True)
class SendUnmask:
    """Secure aggregation: tell a client whose updates came; it answers with Revealed."""

    client: str
    round_num: int
    attempt: int
    came: tuple[str, ...]


@dataclass(frozen=True)
class SendClosed:
    """Tell a client that a round is closed, and whether its update counted."""

    client: str
    round_num: int
    counted: bool


@dataclass(frozen=True)
class Ignore:
    """A message that does not pass the gate; count and log it."""

    client: str
    reason: str
    kind: str = "done"
    """Of the message: ``done``, ``evaluation`` or ``secure``."""


@dataclass(frozen=True)
class Seal:
    """Have the aggregators seal the round; answer with Sealed."""

    round_num: int
    attempt: int = 0


@dataclass(frozen=True)
class Commit:
    """Have the aggregators make the next model of these updates; answer with Committed."""

    round_num: int
    clients: tuple[str, ...]
    opened: Opened | None = None
    """With secure aggregation: what takes the masks off."""
    attempt: int = 0


@dataclass(frozen=True)
class Evaluate:
    """Have a model tested, without a client by the driver; answer with Evaluated or Failed."""

    client: str
    version: int


@dataclass(frozen=True)
class AskOwnTest:
    """Have a client test a model on its own data; answer with OwnTested."""

    client: str
    version: int


@dataclass(frozen=True)
class Keep:
    """Have the aggregators keep the best model; answer with Kept."""

    version: int
    score: Evaluated


@dataclass(frozen=True)
class Close:
    """The round is over, and this is its record."""

    record: RoundRecord


@dataclass(frozen=True)
class End:
    """The run is over."""

    phase: str
    message: str


@dataclass(frozen=True)
class Wait:
    """Nothing to do until the next event, or until a time."""

    until: float | None = None
    why: str = ""
    """For people; empty while everything goes as planned."""


Effect = (
    Persist
    | Open
    | SendTask
    | SendRoster
    | SendGroup
    | SendUnmask
    | SendClosed
    | Ignore
    | Seal
    | Commit
    | Evaluate
    | AskOwnTest
    | Keep
    | Close
    | End
    | Wait
)
