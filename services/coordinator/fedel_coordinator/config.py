"""Settings of the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedel.plugins import Allowed
from fedel.security.tls import Tls

DATABASE_VARIABLE = "FEDEL_DATABASE_URL"
"""Environment variable that overrides ``database_url``, because that may hold a password."""
TOKEN_VARIABLE = "FEDEL_HTTP_TOKEN"
"""Environment variable that overrides ``http_token``."""
VIEW_TOKEN_VARIABLE = "FEDEL_HTTP_VIEW_TOKEN"
"""Environment variable that overrides ``http_view_token``."""
SHARD = "{shard}"
MAX_SHARDS = 1000


@dataclass(frozen=True)
class EnrolmentConfig:
    """The ``[enrolment]`` of a coordinator."""

    authority: str = ""
    """Folder of the certificate authority (``fedel certs init``); with it certificates are renewed here."""
    listen: str = ""
    """Where devices trade tokens for certificates, ``host:port``; empty switches that off."""
    port_file: Path | None = None
    """Write the address listened on here, for scripts that asked for port 0."""

    def __post_init__(self) -> None:
        if self.listen and not self.authority:
            raise ValueError("enrolment.listen needs enrolment.authority, the folder of `fedel certs init`")


@dataclass(frozen=True)
class CoordinatorConfig:
    """What ``coordinator.toml`` holds."""

    listen: str = "127.0.0.1:7070"
    """Address and port of the gRPC service; port 0 takes a free one."""
    port_file: Path | None = None
    """Write the address listened on here, for scripts that asked for port 0."""
    aggregators: tuple[str, ...] = ("127.0.0.1:7071",)
    """Addresses of the aggregators; the order is the order of the shards."""
    public_aggregators: tuple[str, ...] = ()
    """Addresses under which agents reach them, in the same order, where they differ."""
    shards: int = 0
    """Number of aggregators, where one address with ``{shard}`` in it stands for all; 0: all are listed."""
    database_url: str = "sqlite:///coordinator.db"
    """SQLAlchemy URL: ``sqlite:///file`` or ``postgresql+psycopg://user:password@host/name``."""
    runs_dir: Path | None = None
    """Write ``config.toml``, ``rounds.jsonl`` and ``result.json`` of each run below here, if given."""
    http: str = ""
    """Address and port of the live page, its JSON and ``/metrics``; port 0 takes a free one, empty switches it
    off. Anyone who can reach it may read it, unless ``http_view_token`` is set."""
    http_port_file: Path | None = None
    """Write the address of the page here, for scripts that asked for port 0."""
    http_token: str = ""
    """Anyone who has this token may pause, resume and stop runs from the page; if empty, no one may."""
    http_view_token: str = ""
    """Needed to look at the page, its JSON and ``/metrics``; if empty, nothing is needed."""
    http_hosts: tuple[str, ...] = ()
    """Names under which browsers and Prometheus reach the page, beside ``localhost`` and addresses."""
    heartbeat_seconds: float = 5.0
    """Seconds between two heartbeats of an agent."""
    silent_heartbeats: float = 3.0
    """A client that missed this many heartbeats gets no tasks until it sends a message again."""
    max_active_runs: int = 0
    """Runs that are active at once; further ones are queued, by the ``priority`` of their job and their age.
    0: no limit."""
    keep_runs_days: float = 0.0
    """Runs that ended longer ago than this are deleted, with their models; 0: none are."""
    keep_runs: int = 0
    """Only so many of the newest runs that are over are kept; 0: all."""
    max_clients: int = 10_000
    """Clients that may join one run; further ones are refused."""
    max_agents: int = 20_000
    """Agents that are remembered; beyond that, those that were away longest are forgotten."""
    forget_seconds: float = 86_400.0
    """A client that never counted in a round is forgotten after being away for this long."""
    hello_seconds: float = 10.0
    """A new session that does not say who it is within this time is ended."""
    max_messages_per_second: float = 20.0
    """A session that sends more than this for half a minute is ended."""
    max_refused_messages: int = 100
    """A session is ended after this many messages that had to be refused."""
    log_level: str = "INFO"
    """``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``."""
    log_json: bool = True
    """Log lines as JSON; false writes plain text."""
    traces: str = ""
    """``http://host:4317`` of an OpenTelemetry collector (OTLP over gRPC) that gets a trace of every round,
    with ``fedel[otel]``; empty switches it off."""
    health: str = ""
    """Address and port of only gRPC health, in plain text, for probes without a certificate; empty: none."""
    code: Allowed = field(default_factory=Allowed)
    tls: Tls = field(default_factory=Tls)
    enrolment: EnrolmentConfig = field(default_factory=EnrolmentConfig)

    def __post_init__(self) -> None:
        for key in ("aggregators", "public_aggregators"):
            object.__setattr__(self, key, _spread(key, getattr(self, key), self.shards))
        if not self.aggregators:
            raise ValueError("aggregators is empty: name at least one address")
        if self.public_aggregators and len(self.public_aggregators) != len(self.aggregators):
            raise ValueError(
                f"public_aggregators has {len(self.public_aggregators)} addresses,"
                f" aggregators {len(self.aggregators)}: name one for each"
            )
        if self.heartbeat_seconds <= 0 or self.silent_heartbeats < 1:
            raise ValueError("heartbeat_seconds is above 0, silent_heartbeats at least 1")
        if min(self.max_active_runs, self.keep_runs, self.keep_runs_days) < 0:
            raise ValueError("max_active_runs, keep_runs and keep_runs_days are not negative; 0 sets no limit")
        if min(self.max_clients, self.max_agents, self.max_refused_messages) < 1:
            raise ValueError("max_clients, max_agents and max_refused_messages are at least 1")
        if min(self.max_messages_per_second, self.hello_seconds, self.forget_seconds) <= 0:
            raise ValueError("max_messages_per_second, hello_seconds and forget_seconds are above 0")

    @property
    def silent_seconds(self) -> float:
        return self.heartbeat_seconds * self.silent_heartbeats

    @property
    def reachable(self) -> tuple[str, ...]:
        """The aggregators' addresses as agents dial them."""
        return self.public_aggregators or self.aggregators


def _spread(key: str, addresses: tuple[str, ...], shards: int) -> tuple[str, ...]:
    """Every address: one for each shard, if the only one stands for all of them."""
    if not 0 <= shards <= MAX_SHARDS:
        raise ValueError(f"shards is 0 to {MAX_SHARDS}")
    if any(SHARD in address for address in addresses):
        if len(addresses) > 1 or not shards:
            raise ValueError(
                f"{key}: one address with {SHARD} stands for all aggregators, and shards says how many"
            )
        return tuple(addresses[0].replace(SHARD, str(shard)) for shard in range(shards))
    if addresses and shards not in (0, len(addresses)):
        raise ValueError(f"shards is {shards}, but {key} has {len(addresses)} addresses and none with {SHARD}")
    return addresses
