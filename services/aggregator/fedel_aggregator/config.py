"""The settings of an aggregator."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedel.plugins import Allowed
from fedel.security.tls import Tls


@dataclass(frozen=True)
class AggregatorConfig:
    """The keys of ``aggregator.toml``."""

    listen: str = "127.0.0.1:7071"
    """Where the gRPC service listens, ``host:port``; port 0 takes a free one."""
    data_dir: Path = Path("aggregator-data")
    """Where models and updates are kept; only one process at a time can use it."""
    port_file: Path | None = None
    """Write the address of ``listen`` to this file, for scripts that use port 0."""
    http: str = ""
    """Where ``/metrics`` is served, ``host:port``; port 0 takes a free one, empty switches it off."""
    http_port_file: Path | None = None
    """Write the address of ``http`` to this file, for scripts that use port 0."""
    http_hosts: tuple[str, ...] = ()
    """Names under which Prometheus reaches ``/metrics``, beside ``localhost`` and addresses."""
    max_uploads: int = 4
    """Clients that may send at the same time; the others wait, which costs neither memory nor a thread."""
    max_downloads: int = 8
    """Downloads of a model at the same time; the others wait."""
    max_downloads_per_client: int = 2
    """Of these, how many one client can have; without TLS one connection."""
    min_bytes_per_second: int = 8000
    """A stream that is slower over a minute ends, so that others have their turn; 0 allows any rate."""
    idle_seconds: float = 60.0
    """Idle timeout of a stream: it is closed, and the client can resume later."""
    keep_updates: int = 0
    """How many closed rounds of a run ``fedel audit`` can replay: their updates stay on disk; -1 keeps all."""
    log_level: str = "INFO"
    """``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``."""
    log_json: bool = True
    """Log lines as JSON; false writes plain text."""
    health: str = ""
    """Serve only gRPC health here too, in plain text, for probes without a certificate; empty: nowhere."""
    code: Allowed = field(default_factory=Allowed)
    tls: Tls = field(default_factory=Tls)

    def __post_init__(self) -> None:
        if min(self.max_uploads, self.max_downloads, self.max_downloads_per_client) < 1:
            raise ValueError("max_uploads, max_downloads and max_downloads_per_client must be at least 1")
        if self.min_bytes_per_second < 0:
            raise ValueError("min_bytes_per_second must be 0 or more")
        if self.keep_updates < -1:
            raise ValueError("keep_updates is a number of rounds, 0 for none, or -1 for all")
        if self.idle_seconds <= 0:
            raise ValueError("idle_seconds must be above 0")
