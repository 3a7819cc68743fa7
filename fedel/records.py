"""What is written down about rounds and runs: lines of ``rounds.jsonl``, ``result.json`` and ``exits.json``.

A federation and a simulation write the same records. What only one of them knows has a default in the other.
"""

from __future__ import annotations

import platform
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fedel import __version__
from fedel.client_tests import ClientTests, Spread
from fedel.serialisation import from_json, to_json

DEVICE_PHASES = ("download", "probe", "train", "wait", "upload")
"""What a client does for a round, in the order of time."""


@dataclass(frozen=True)
class DeviceUsage:
    """What the sensors of a device measured during a task; ``None`` where it has no sensor."""

    power_watts: float | None = None
    energy_joules: float | None = None
    temperature_celsius: float | None = None


@dataclass(frozen=True)
class ClientRecord:
    """One client's part of a round."""

    client: str
    window: tuple[int, int] | None
    """End block and front block; ``None`` for a method without windows."""
    resets: int
    num_selected: int
    selected: tuple[str, ...]
    num_steps: int
    num_samples: int
    loss: float | None
    budget_seconds: float
    """T_th of the round: that of a step times the steps of the plan."""
    predicted_seconds: float
    predicted_forward_seconds: float
    predicted_backward_seconds: float
    train_seconds: float
    deviation: float | None
    """Time that counts over T_th, minus one; ``None`` where no time was measured."""
    predicted_deviation: float | None
    over_budget: bool
    peak_memory_bytes: int
    device_type: str = ""
    bytes_up: int = 0
    bytes_down: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of download, probe, train, wait (for a permit to send) and upload on a real clock."""
    device: DeviceUsage = field(default_factory=DeviceUsage)
    clock_seconds: Mapping[str, float] = field(default_factory=dict)
    """Simulated training seconds, by budget scope."""
    network_seconds: float = 0.0
    """Simulated seconds of download and upload."""
    slowness: float = 1.0
    """How many times slower than its timing profile it was taken to be, from the rounds before."""
    last_share: float = 1.0
    """Share of a batch in the last of its steps."""
    staleness: int = 0
    """Rounds that its update is late: it was trained from the version of so many rounds before."""

    @property
    def counted_seconds(self) -> float:
        """Seconds that count against T_th."""
        return self.train_seconds if self.deviation is None else self.budget_seconds * (1 + self.deviation)


@dataclass(frozen=True)
class RoundRecord:
    """One line of ``rounds.jsonl``."""

    round: int
    strategy: str
    budget_seconds: float
    """T_th of one training step."""
    num_tasks: int
    num_updates: int
    loss: float | None
    """Mean training loss of the clients that count."""
    o1: float
    """Bias from training unequal parts of the model (paper, appendix)."""
    clients: tuple[ClientRecord, ...]
    num_late: int = 0
    """Updates of earlier rounds that count in this one."""
    version: int = 0
    """Version of the model that the round made."""
    opened_at: float = 0.0
    """Unix seconds."""
    latency_seconds: float = 0.0
    """From the first task to the new model."""
    collect_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase; of phases on devices, the longest."""
    bytes_up: int = 0
    bytes_down: int = 0
    tensor_clients: Mapping[str, int] = field(default_factory=dict)
    """Clients that trained each tensor."""
    tensor_untrained_rounds: Mapping[str, int] = field(default_factory=dict)
    """Rounds since each tensor was last trained."""
    accuracy: float | None = None
    """Test accuracy of the new model; ``None`` if it was not tested."""
    test_loss: float | None = None
    evaluate_seconds: float | None = None
    exit_accuracies: tuple[float, ...] | None = None
    """Test accuracy at each exit, where it was measured."""
    client_tests: ClientTests | None = None
    """The new model on the clients' own data; ``None`` if they did not test it."""
    scope: str = ""
    """The clock that T_th is held against: ``backward`` or ``train``."""
    clock_seconds: Mapping[str, float] = field(default_factory=dict)
    """Simulated seconds of the round, by budget scope."""
    deadline_seconds: float = 0.0
    dropped: tuple[str, ...] = ()
    """Clients that never came back (simulation)."""
    late: tuple[str, ...] = ()
    """Clients that came back after the round was closed (simulation)."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Clients whose update was refused or never came, with the reason."""
    wall_seconds: float | None = None
    """Seconds the simulation of the round took on this machine."""
    epsilon: float | None = None
    """Privacy that a client has spent if it took part in every round so far; ``None`` without noise."""
    trouble: str = ""
    """Why the record is incomplete, if it is."""

    @property
    def tested(self) -> bool:
        return self.accuracy is not None

    @property
    def own(self) -> Spread | None:
        """What the tests on clients' own data come to, if there were any."""
        return self.client_tests.overall if self.client_tests else None

    @property
    def late_note(self) -> str:
        """For people, after the number of updates; empty if none is late."""
        return f", {self.num_late} late" if self.num_late else ""

    def client(self, name: str) -> ClientRecord | None:
        return next((entry for entry in self.clients if entry.client == name), None)

    def seconds_of(self, entry: ClientRecord) -> dict[str, float]:
        """Where the seconds of the round went for one of its clients, by phase, in the order of time.

        They add up to ``latency_seconds``. Beside the client's own phases there are ``idle``, while it did
        nothing for the round, and ``commit``, from the last update to the new model.
        """
        own = dict(entry.phases) or {"train": entry.train_seconds}
        after = max(0.0, self.latency_seconds - (self.collect_seconds or self.latency_seconds))
        idle = max(0.0, self.latency_seconds - after - sum(own.values()))
        return {name: own.get(name, 0.0) for name in DEVICE_PHASES} | {"idle": idle, "commit": after}

    def deviations(self) -> list[float]:
        return [entry.deviation for entry in self.clients if entry.deviation is not None]

    def to_json(self) -> str:
        """One line, without its end."""
        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes, where: str = "record of a round") -> RoundRecord:
        return from_json(RoundRecord, text, where)


@dataclass(frozen=True, kw_only=True)
class ClientResult:
    """How well a client kept to T_th over the whole run."""

    device_type: str = ""
    deviation_mean: float | None
    deviation_max: float | None
    """The one furthest from zero."""
    rounds_measured: int


@dataclass(frozen=True)
class Origin:
    """Where the first model of a run came from, if not from its seed alone."""

    file: str
    """Its path on the machine that started the run."""
    sha256: str

    def to_json(self) -> str:
        return to_json(self, pretty=True) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "origin.json") -> Origin:
        return from_json(Origin, text, where)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """``result.json``: what a run came to. Fields that older versions did not write have defaults."""

    run: str
    phase: str
    strategy: str
    seed: int
    rounds: int
    accuracy: float | None
    test_loss: float | None
    best_accuracy: float | None
    best_test_loss: float | None = None
    best_round: int | None
    best_version: int | None = None
    model_version: int = 0
    scope: str = ""
    wall_seconds: float
    virtual_seconds: float | None
    """Seconds the fleet would have taken; ``None`` for a federation on a real clock."""
    clock_seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_up: int
    bytes_down: int
    clients: Mapping[str, ClientResult]
    tensors: tuple[str, ...]
    """Names of the weights, in forward order."""
    versions: Mapping[str, str]
    message: str = ""
    profile: Mapping[str, str] = field(default_factory=dict)
    """Where the timing profile of a simulation came from."""
    partition: str = ""
    """Digest of how a simulation split the data."""
    epsilon: float | None = None
    """Of the last round."""
    average: float = 0.0
    """``server.average`` of the run. Above 0, accuracies are those of an average over versions."""
    origin: Origin | None = None
    """The file that the first model came from."""
    client_tests: ClientTests | None = None
    """The last one of the run."""

    def to_json(self) -> str:
        return to_json(self, pretty=True) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "result.json") -> RunResult:
        return from_json(RunResult, text, where)


@dataclass(frozen=True)
class ExitRow:
    """One early exit of a trained model: the network up to its block, and its head."""

    exit: int
    block: str
    accuracy: float
    """On the test data."""
    num_parameters: int
    num_bytes: int
    """Of parameters and statistics."""
    ms_per_sample: float
    """Median of repeats on one thread of a processor."""


@dataclass(frozen=True)
class ExitTable:
    """``exits.json``: what each exit of a run's model is worth, measured on one machine."""

    round: int
    """Whose model it is, counted from 1."""
    batch_size: int
    machine: str
    exits: tuple[ExitRow, ...]
    together: tuple[int, ...] = ()
    """Exits that answer together, where that is what the run tested: DepthFL, and the option ``answer``."""
    together_accuracy: float | None = None
    """Of the mean of their logits."""

    def to_json(self) -> str:
        return to_json(self, pretty=True) + "\n"

    @staticmethod
    def from_json(text: str | bytes, where: str = "exits.json") -> ExitTable:
        return from_json(ExitTable, text, where)


def best_of(records: Sequence[RoundRecord]) -> RoundRecord | None:
    """The round with the highest accuracy, the first of equal ones; ``None`` if none was tested."""
    tested = [record for record in records if record.accuracy is not None]
    return max(tested, key=lambda record: record.accuracy or 0.0, default=None)


def client_results(records: Iterable[RoundRecord]) -> dict[str, ClientResult]:
    """By client: training time over T_th, minus one, as a mean and at its largest."""
    types: dict[str, str] = {}
    deviations: dict[str, array[float]] = {}
    for entry in (entry for record in records for entry in record.clients):
        types[entry.client] = entry.device_type
        measured = deviations.setdefault(entry.client, array("d"))
        if entry.deviation is not None:
            measured.append(entry.deviation)
    return {
        client: ClientResult(
            device_type=types[client],
            deviation_mean=sum(values) / len(values) if values else None,
            deviation_max=max(values, key=abs, default=None),
            rounds_measured=len(values),
        )
        for client, values in sorted(deviations.items())
    }


def run_result(
    *,
    name: str,
    phase: str,
    strategy: str,
    seed: int,
    scope: str,
    weights: Sequence[str],
    records: Iterable[RoundRecord],
    wall_seconds: float,
    virtual: bool = False,
    model_version: int | None = None,
    message: str = "",
    versions: Mapping[str, str] | None = None,
    profile: Mapping[str, str] | None = None,
    partition: str = "",
    average: float = 0.0,
    origin: Origin | None = None,
) -> RunResult:
    """What the rounds of a run come to; ``virtual`` if they were simulated.

    ``records`` are read once, and not kept: those of a long run of many clients do not fit into memory."""
    rounds: list[RoundRecord] = []
    own_tests: ClientTests | None = None

    def noted() -> Iterator[RoundRecord]:
        nonlocal own_tests
        for record in records:
            own_tests = record.client_tests or own_tests
            rounds.append(replace(record, clients=(), client_tests=None))
            yield record

    clients = client_results(noted())
    tested = [record for record in rounds if record.accuracy is not None]
    final = tested[-1] if tested else None
    best = best_of(rounds)
    losses = [record.test_loss for record in tested if record.test_loss is not None]
    scopes = rounds[0].clock_seconds if rounds else {}
    ours = {"fedel": __version__, "python": platform.python_version(), "numpy": np.__version__}
    return RunResult(
        run=name,
        phase=phase,
        message=message,
        strategy=strategy,
        seed=seed,
        rounds=len(rounds),
        accuracy=final.accuracy if final else None,
        test_loss=final.test_loss if final else None,
        best_accuracy=best.accuracy if best else None,
        best_test_loss=min(losses, default=None),
        best_round=best.round if best else None,
        best_version=best.version if best else None,
        model_version=len(rounds) if model_version is None else model_version,
        scope=scope,
        wall_seconds=wall_seconds,
        virtual_seconds=sum(record.latency_seconds for record in rounds) if virtual else None,
        clock_seconds={each: sum(record.clock_seconds[each] for record in rounds) for each in scopes},
        bytes_up=sum(record.bytes_up for record in rounds),
        bytes_down=sum(record.bytes_down for record in rounds),
        clients=clients,
        tensors=tuple(weights),
        versions=ours | dict(versions or {}),
        profile=profile or {},
        partition=partition,
        epsilon=rounds[-1].epsilon if rounds else None,
        average=average,
        origin=origin,
        client_tests=own_tests,
    )
