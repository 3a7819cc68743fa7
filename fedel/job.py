"""The settings of a job file; the same for a federation and for a simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedel import config
from fedel.core.staleness import Staleness
from fedel.selectors import Selector
from fedel.types import PACES, LocalWork, UploadSettings

POLICIES = ("fastest", "percentile", "share", "fixed")
INPUTS = ("float32", "int64")
MAX_INPUT, MAX_CLASSES = 10**9, 10**6
"""Values of one sample, and classes, of a job that says them."""
FOLDS = ("mean", "trimmed_mean", "median")
SPLITS = ("dirichlet", "dirichlet-equal", "user", "iid")


@dataclass(frozen=True)
class Budget:
    """T_th: how long one training step may take."""

    policy: str = "fastest"
    """``fastest`` device, ``percentile`` of devices, ``share`` of the fastest device, or ``fixed`` seconds. Of
    three or more devices, one that is ten times faster than the median is not taken for the fastest."""
    value: float = 0.0
    """The percentile, share or seconds, if the policy needs one."""
    pace: str = ""
    """How clients keep T_th: with ``clock`` a training ends when T_th is over, and measured seconds correct the
    next rounds; with ``plan`` it makes exactly the steps that its timing profile says fit, so that a run can be
    repeated bit for bit. Empty: ``clock`` on devices, ``plan`` in a simulation."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy = {self.policy!r} is not one of: {', '.join(POLICIES)}")
        if self.pace not in ("", *PACES):
            raise ValueError(f"pace = {self.pace!r} is not one of: {', '.join(PACES)}")


@dataclass(frozen=True)
class Rounds:
    """How rounds run."""

    num_rounds: int = 20
    """Rounds of the run. A simulation that goes on may get more (docs/warm-start.md)."""
    max_seconds: float = 0.0
    """The run also ends with the round after which its rounds took this long in all; 0: no limit."""
    num_participants: int = 0
    """Clients per round; 0 means all connected clients."""
    over_select: float = 1.0
    """Send tasks to this many times ``num_participants``; the round closes when enough have reported."""
    min_clients: int = 1
    """Do not start the first round until this many clients have joined. Later rounds go on with those that are
    here: what every round needs is ``min_reports``."""
    min_reports: int = 1
    """A round with fewer updates at its deadline stays open."""
    deadline_factor: float = 8.0
    """Deadline of a round, as a multiple of T_th times the local steps."""
    deadline_floor_seconds: float = 60.0
    """Minimum deadline: small models spend more time in transfers than in training. In a simulation it is 0
    unless the job says otherwise."""
    max_deadline_seconds: float = 86_400.0
    """Maximum deadline: whatever clients say about themselves, no round waits longer."""
    max_repeats: int = 3
    """A round with too few updates starts its deadline again this often; then the run pauses."""
    max_samples: int = 1_000_000
    """A client counts at most this many samples, where a method weights clients by their samples."""
    late: str = "refuse"
    """An update that arrives after its round closed: ``refuse`` it; count it in full in the ``next`` round; or
    ``weigh`` it, in whatever round is open when it arrives. What counts is its change, added to the model of
    that round; its client gets no new task before it is back or too late."""
    max_staleness: int = 4
    """With ``weigh``: the most rounds that an update may be late. As many versions of the model are kept."""
    staleness_power: float = 0.5
    """With ``weigh``: the change of an update that is n rounds late counts (1 + n) to the power -p, this p."""
    evaluate_every: int = 1
    """Test the model every n-th round, and after the last round; 0 means never."""
    evaluate_clients_every: int = 0
    """Have every client test the model on data of its own that it does not train on (``held_out``), every n-th
    round and after the last; 0 means never (docs/data.md)."""
    keep_every: int = 0
    """Keep every n-th model on disk; 0 keeps only the newest and the best."""
    lr_decay: float = 1.0
    """The learning rate is multiplied by this after each round."""

    def __post_init__(self) -> None:
        if self.staleness.max_rounds < 1 and self.late != "refuse":
            raise ValueError(f"max_staleness = {self.max_staleness}: at least 1, or set late = 'refuse'")
        if self.max_seconds < 0:
            raise ValueError(f"max_seconds = {self.max_seconds:g}: seconds are not negative, 0 sets no limit")
        if self.evaluate_clients_every < 0:
            raise ValueError("evaluate_clients_every is a number of rounds, or 0 for never")
        for name in ("num_rounds", "over_select", "min_clients", "max_samples", "max_repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: at least 1")
        if self.deadline_factor <= 0 or self.max_deadline_seconds <= 0:
            raise ValueError("deadline_factor and max_deadline_seconds must be above 0")

    @property
    def staleness(self) -> Staleness:
        """What happens to late updates."""
        return Staleness.of(self.late, self.max_staleness, self.staleness_power)


@dataclass(frozen=True)
class Workload:
    """The model and the data set."""

    model: str = "vgg16"
    """A model that FedEL knows, or ``package.module:function`` for your own."""
    data: str = "cifar10"
    """A data set that FedEL knows, or ``package.module:function`` for your own."""
    model_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model, such as ``width``, or arguments of your own function."""
    data_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the data set, or arguments of your own function."""
    input: tuple[int, ...] = ()
    """Shape of one sample as the model takes it, such as ``[1, 28, 28]``; with ``classes``. Then the machine
    that starts the job needs no data: it stays on the devices (docs/data.md). Empty: the data is read there."""
    input_dtype: str = "float32"
    """With ``input``: what the model takes, ``float32``, or ``int64`` for tokens."""
    classes: int | tuple[str, ...] = 0
    """With ``input``: how many classes there are, or their names; for text, the size of the vocabulary."""
    initial: str = ""
    """A file of weights that the first model gets: a model of another run, or the state dict of your own
    network (docs/warm-start.md). Read on the machine that starts the job; empty draws them from the seed."""
    initial_strict: bool = True
    """Whether that file must have every tensor of the model, with its shape, and no others. ``false``: what
    does not fit starts fresh, such as a new classifier."""

    def __post_init__(self) -> None:
        if self.input_dtype not in INPUTS:
            raise ValueError(f"input_dtype = {self.input_dtype!r} is not one of: {', '.join(INPUTS)}")
        if bool(self.input) != bool(self.classes):
            raise ValueError(
                "input and classes go together: give the shape of a sample and the classes, or neither"
            )
        if any(size < 1 for size in self.input) or math.prod(self.input) > MAX_INPUT:
            raise ValueError(
                f"input = {list(self.input)}: each size is above 0, and a sample has at most 10^9 values"
            )
        number = self.classes if isinstance(self.classes, int) else len(self.classes)
        if not 0 <= number <= MAX_CLASSES:
            raise ValueError(f"classes = {number}: at least 1, at most {MAX_CLASSES:,}")

    @property
    def class_names(self) -> tuple[str, ...]:
        """As ``classes`` has them: their names, or their numbers."""
        return tuple(map(str, range(self.classes))) if isinstance(self.classes, int) else self.classes


@dataclass(frozen=True)
class Protection:
    """Against clients that lie, and for the privacy of clients (docs/privacy.md)."""

    clip_norm: float = 0.0
    """The largest norm of a client's change per round; larger changes are scaled down to it. 0: no limit."""
    fold: str = "mean"
    """``mean`` as the method has it, or of every value the ``trimmed_mean`` or ``median`` over the clients that
    trained it. These two keep a round's updates to its end: an aggregator on disk, a simulation in memory."""
    trim: float = 0.1
    """Share of the clients that ``trimmed_mean`` leaves out at each end, rounded up."""
    noise_multiplier: float = 0.0
    """Differential privacy: noise of this many times ``clip_norm`` on the sum of the changes. 0: none."""
    num_expected: int = 0
    """With noise, the sum of the changes is always divided by this: the participants that are expected."""
    delta: float = 1e-5
    """With noise, the probability for which ``epsilon`` does not hold; well below 1 / number of clients."""
    secure: bool = False
    """Secure aggregation: the server learns the sum of the updates and no single one."""

    def __post_init__(self) -> None:
        if self.fold not in FOLDS:
            raise ValueError(f"fold = {self.fold!r} is not one of: {', '.join(FOLDS)}")
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim = {self.trim:g}: at least 0 and below 0.5; or take fold = 'median'")
        if min(self.clip_norm, self.noise_multiplier) < 0 or not 0 < self.delta < 1:
            raise ValueError("clip_norm and noise_multiplier are not negative, and delta is between 0 and 1")
        if not math.isfinite(self.clip_norm + self.noise_multiplier):
            raise ValueError("clip_norm and noise_multiplier are numbers; 0 switches them off")
        if self.noise_multiplier and not (self.clip_norm and self.num_expected > 0):
            raise ValueError(
                "noise_multiplier needs clip_norm, which bounds what a client changes, and num_expected, the"
                " number of clients that are expected in a round"
            )
        if self.noise_multiplier and self.fold != "mean":
            raise ValueError(f"noise_multiplier does not go with fold = {self.fold!r}, only with the mean")
        if self.secure and (self.clip_norm or self.fold != "mean"):
            raise ValueError("secure goes with no other protection: the server sees no update to clip or trim")


@dataclass(frozen=True)
class Server:
    """What becomes of the mean of a round, whatever the method (docs/server.md)."""

    average: float = 0.0
    """The share of an average over versions that stays in each round, such as 0.75. The average is what is
    tested and published; clients train the newest version. 0: that version is tested and published itself."""
    momentum: float = 0.0
    """The share of the last step of the model that each step has in addition (FedAvgM); 0: none."""

    def __post_init__(self) -> None:
        for name, value in (("average", self.average), ("momentum", self.momentum)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} = {value:g}: at least 0, which switches it off, and below 1")


@dataclass(frozen=True)
class Split:
    """Parts of one data set that every device has, for trials on a federation (docs/data.md). A run on one
    machine has ``[fleet.data]`` for it, a simulation ``[partition]``; both ignore this."""

    clients: tuple[str, ...] = ()
    """Names of the agents that take part: the first trains on part 0, the next on part 1. Empty: the section
    ``[data]`` of each agent counts."""
    method: str = field(default="dirichlet", metadata={"words": SPLITS})
    """``dirichlet``, ``dirichlet-equal`` (parts of equal size), ``user`` (natural owners) or ``iid``."""
    alpha: float = 0.1
    """Concentration of ``dirichlet``; a small value gives uneven parts."""
    balance: bool = True
    """A client that already holds 1/N of the samples is skipped for the remaining classes."""
    min_size: int = 10
    """Draw again until the smallest part holds this many samples."""
    seed: int = 0
    """Seed of the split."""

    def __post_init__(self) -> None:
        if len(set(self.clients)) < len(self.clients):
            raise ValueError("clients: each name once, one part for each")

    def takes(self, client: str) -> bool:
        """Whether there is a part for this client, or no need of one."""
        return not self.clients or client in self.clients


@dataclass(frozen=True)
class CodeFiles:
    """Your own model, data and method, which `fedel run --coordinator` sends along (docs/job-code.md). On this
    machine and in a simulation they are found without it."""

    files: tuple[str, ...] = ()
    """Python files, packages and folders, seen from the folder of the job file; ``--code`` names more."""


@dataclass(frozen=True)
class RunConfig:
    """A job."""

    seed: int = 0
    """Everything random in the run is derived from this seed."""
    priority: int = 0
    """From -1000 to 1000: of the runs that wait in a coordinator's queue, the highest starts first
    (docs/runs.md)."""
    clients: str = ""
    """Which agents of a federation take part, by their labels: ``gpu=orin,site!=lab``. All of ``key=value``,
    ``key!=value``, ``key`` and ``!key`` must hold; ``name`` and ``device`` go like labels (docs/fleet.md).
    Empty: all of them. A simulation ignores it."""
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"name": "fedel"})
    """The method, by its ``name``, and its options."""
    workload: Workload = field(default_factory=Workload)
    rounds: Rounds = field(default_factory=Rounds)
    budget: Budget = field(default_factory=Budget)
    work: LocalWork = field(default_factory=LocalWork)
    upload: UploadSettings = field(default_factory=UploadSettings)
    protection: Protection = field(default_factory=Protection)
    server: Server = field(default_factory=Server)
    split: Split = field(default_factory=Split)
    trainer: str = "fedel.training.factory:make_trainer"
    """The function that builds the trainer on a device: ``package.module:function``."""
    bundle: str = ""
    """SHA-256 of the code that travels with the job (docs/job-code.md); ``fedel run`` fills it in."""

    def __post_init__(self) -> None:
        if abs(self.priority) > 1000:
            raise ValueError(f"priority = {self.priority}: from -1000 to 1000")
        try:
            Selector.parse(self.clients)
        except ValueError as error:
            raise ValueError(f"clients = {self.clients!r}: {error}") from None
        if self.protection.secure and self.rounds.late != "refuse":
            raise ValueError("protection.secure needs rounds.late = 'refuse': a mask is good for one round")
        if self.protection.secure and self.upload.compression != "none":
            raise ValueError(
                "protection.secure needs upload.compression = 'none': the sum of masked updates is known, and"
                " compressed changes, each with places or a scale of its own, have no such sum"
            )

    @staticmethod
    def parse(table: Mapping[str, Any], where: str = "job") -> RunConfig:
        return config.parse(RunConfig, table, where)

    def table(self) -> dict[str, Any]:
        """The effective configuration, with every default written out; ``split`` only if there is one, because
        agents of earlier versions do not know it."""
        table = asdict(self)
        if not self.split.clients:
            del table["split"]
        return table

    def table_to_send(self) -> dict[str, Any]:
        """As servers and devices get it: without the name of a file of this machine."""
        table = self.table()
        for key in ("initial", "initial_strict"):
            del table["workload"][key]
        return table
