"""What an aggregator can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedel.security.tls import Tls


@dataclass(frozen=True)
class AggregatorConfig:
    """The keys of ``aggregator.toml``."""

    listen: str = "127.0.0.1:7071"
    """Where to listen, ``host:port``; port 0 takes a free one."""
    data_dir: Path = Path("aggregator-data")
    """Where models and updates are kept; one process alone may use it."""
    port_file: Path | None = None
    """Write the address listened on here, for scripts that asked for port 0."""
    http: str = ""
    """Where to show ``/metrics``, ``host:port``; port 0 takes a free one, empty switches it off."""
    http_port_file: Path | None = None
    """Write the address of ``http`` here, for scripts that asked for port 0."""
    max_uploads: int = 4
    """Clients that may send at once; the others wait, which costs neither memory nor a thread."""
    max_downloads: int = 8
    """Clients that may fetch a model at once; the others wait."""
    idle_seconds: float = 60.0
    """A stream that stands still for so long is ended; its client may go on later where it was."""
    log_level: str = "INFO"
    """``DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``."""
    log_json: bool = True
    """Log lines as JSON; false writes plain text."""
    health: str = ""
    """Address and port of gRPC health alone, in plain text, for probes without a certificate; empty: none."""
    tls: Tls = field(default_factory=Tls)

    def __post_init__(self) -> None:
        if self.max_uploads < 1 or self.max_downloads < 1:
            raise ValueError("max_uploads and max_downloads are at least 1")
        if self.idle_seconds <= 0:
            raise ValueError("idle_seconds is above 0")
