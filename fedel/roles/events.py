"""What happens to a run (events), and what the round engine wants done about it (effects)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedel.core.secure_server import Opened
from fedel.core.secure_sum import Keys, Reveal
from fedel.records import RoundRecord
from fedel.roles.run_state import Member, TaskResult
from fedel.security.signed_keys import NO_PROOF, Proof
from fedel.types import Memory, Participant, Report, Task

# Events


@dataclass(frozen=True)
class Settle:
    """Draw the conclusions from what has happened: is it enough, who evaluates."""


@dataclass(frozen=True)
class Tick:
    """Time has passed: settle, open a round if it is time, act on a deadline."""


@dataclass(frozen=True)
class Restarted:
    """The process that drives the run has just loaded it: nobody is connected, nothing is in flight."""


@dataclass(frozen=True)
class Joined:
    """A client is ready, for the first time or again."""

    member: Member


@dataclass(frozen=True)
class Left:
    """A client said goodbye."""

    client: str


@dataclass(frozen=True)
class Disconnected:
    """A client's session broke; it may come back and go on with its task."""

    client: str


@dataclass(frozen=True)
class Lost:
    """A client was not heard for too long."""

    client: str


@dataclass(frozen=True)
class Found:
    """A client that was lost is heard again."""

    client: str


@dataclass(frozen=True)
class Withheld:
    """An operator keeps a client from the next rounds, or gives it back; a task that it has goes on."""

    client: str
    withheld: bool


@dataclass(frozen=True)
class Accepted:
    """A client started its task."""

    client: str
    round_num: int


@dataclass(frozen=True)
class Declined:
    """A client will not do its task."""

    client: str
    round_num: int
    reason: str


@dataclass(frozen=True)
class Done:
    """A client finished its task. Which updates count, the aggregators say when the round is sealed."""

    client: str
    result: TaskResult


@dataclass(frozen=True)
class Failed:
    """A client could not finish; without a round number, it could not prepare for the run or evaluate."""

    client: str
    round_num: int
    message: str


@dataclass(frozen=True)
class Keyed:
    """Secure aggregation: a client has trained, and names its keys and its tensors."""

    client: str
    round_num: int
    attempt: int
    keys: Keys
    tensors: tuple[str, ...]
    proof: Proof = NO_PROOF
    """That the keys are its own, for the other clients to check."""


@dataclass(frozen=True)
class Shared:
    """Secure aggregation: a client's sealed shares, by receiver."""

    client: str
    round_num: int
    attempt: int
    shares: Mapping[str, bytes]


@dataclass(frozen=True)
class Revealed:
    """Secure aggregation: a client's shares of others' secrets, after the seal."""

    client: str
    round_num: int
    attempt: int
    reveal: Reveal


@dataclass(frozen=True)
class Sealed:
    """The aggregators accept no more updates of the round; they all hold these."""

    round_num: int
    reports: tuple[Report, ...]
    attempt: int = 0
    """As in the Seal that it answers: an answer to an earlier one counts no more."""
    final: bool = False
    """No other update can come any more, however few there are; only a simulation knows that."""


@dataclass(frozen=True)
class Committed:
    """The aggregators made the next model."""

    round_num: int
    version: int
    global_importance: Mapping[str, float]
    num_clients: Mapping[str, int]
    fold_seconds: float = 0.0
    commit_seconds: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """The model was tested."""

    version: int
    accuracy: float
    loss: float
    seconds: float | None = None
    exit_accuracies: tuple[float, ...] | None = None
    client: str = ""
    """Who tested it; "" for the driver."""


@dataclass(frozen=True)
class OwnTested:
    """A client tested the model on its own data, or could not."""

    client: str
    version: int
    accuracy: float
    loss: float
    num_samples: int
    seconds: float | None = None
    problem: str = ""
    """Why it could not."""


@dataclass(frozen=True)
class Kept:
    """The aggregators keep the best model; what Keep asked for is done."""

    version: int
    score: Evaluated


@dataclass(frozen=True)
class Controlled:
    """A person wants the run to ``pause``, ``resume``, ``stop`` or ``stop_now``."""

    action: str
    by: str = ""
    """Who it is, if that is known."""
    why: str = ""


@dataclass(frozen=True)
class Admitted:
    """It is the turn of a run that is queued."""


@dataclass(frozen=True)
class CloseNow:
    """Nobody else can come back: the open round closes with the updates it has."""


@dataclass(frozen=True)
class Interrupted:
    """The run is stopping and an aggregator cannot be reached: the open round is given up."""


@dataclass(frozen=True)
class Stuck:
    """Something did not work that should have: the run pauses and says why. Resumed, it tries again."""

    reason: str


@dataclass(frozen=True)
class Forgotten:
    """A client that never counted has been away for long: the run need not remember it."""

    client: str


Event = (
    Settle
    | Tick
    | Restarted
    | Joined
    | Left
    | Disconnected
    | Lost
    | Found
    | Withheld
    | Accepted
    | Declined
    | Done
    | Failed
    | Keyed
    | Shared
    | Revealed
    | Sealed
    | Committed
    | Evaluated
    | OwnTested
    | Kept
    | Controlled
    | Admitted
    | CloseNow
    | Interrupted
    | Stuck
    | Forgotten
)

FACTS = (Joined, Left, Disconnected, Lost, Found, Withheld, Accepted, Declined, Done, Failed)
"""What is said of one client, and only noted: a ``Tick`` follows, which says what the run waits for now."""

# Effects, to be carried out in order


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
