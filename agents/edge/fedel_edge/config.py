"""An agent's configuration."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedel.plugins import Allowed
from fedel.roles.gate import objection_to_name
from fedel.security.tls import Tls
from fedel.selectors import objection_to_labels
from fedel.training.settings import DataPart, TrainerSettings
from fedel_edge.gate import Limits


@dataclass(frozen=True)
class AgentConfig:
    coordinator: str = "127.0.0.1:7070"
    """Address of the coordinator, ``host:port``; the aggregators' addresses come from it."""
    name: str = ""
    """Name of this client, unique in the federation; empty uses the certificate's, or the host's name."""
    state_dir: Path = Path("agent-state")
    """Where models, memories and profiles are kept; after a restart the agent continues from here."""
    device: str = "cpu"
    """What the agent trains on: ``cpu``, ``cuda``, ``cuda:1``, ..."""
    device_type: str = ""
    """Type of hardware, for grouping metrics; empty reads it from the device."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of this device, such as ``{gpu = "orin"}``: a job's ``clients`` choose agents by them."""
    threads: int = 0
    """CPU threads of torch; 0 leaves it to torch. Use 1 where several agents share a machine."""
    slowdown: float = 1.0
    """Behave as a device that is this many times slower, for trials on one machine."""
    memory_mb: int = 0
    """Megabytes of memory that the agent may take in all, on a GPU of the GPU's memory; 0 sets no limit."""
    profile: str = ""
    """File with a timing profile; empty measures one, once per model."""
    evaluate: bool = True
    """Offer to test models on the data set's test data."""
    evaluate_beside_training: bool = True
    """Test while this device trains, in a thread of its own. That takes the memory of a second model; with
    ``false``, a test and a task wait for each other."""
    grace_seconds: float = 10.0
    """How long an upload may still take when the agent is stopped."""
    http: str = ""
    """Serve ``/metrics`` on ``host:port``, for a device that Prometheus can reach; port 0 picks a free one,
    empty switches it off. The coordinator's own metrics include most of it."""
    log_level: str = "INFO"
    log_json: bool = True
    """Logs as JSON lines, or as plain text."""
    data: DataPart = field(default_factory=DataPart)
    code: Allowed = field(default_factory=Allowed)
    limits: Limits = field(default_factory=Limits)
    tls: Tls = field(default_factory=Tls)

    def __post_init__(self) -> None:
        if self.slowdown < 1:
            raise ValueError(f"slowdown = {self.slowdown:g}: use at least 1, which leaves the device as it is")
        if self.threads < 0 or self.grace_seconds < 0 or self.memory_mb < 0:
            raise ValueError("threads, grace_seconds and memory_mb cannot be negative; 0 is the least")
        for what, text in (("name", self.name), ("device_type", self.device_type)):
            if text and (wrong := objection_to_name(text, what)):
                raise ValueError(wrong)
        if wrong := objection_to_labels(self.labels):
            raise ValueError(wrong)
        if ":" not in self.coordinator:
            raise ValueError(f"coordinator = {self.coordinator!r}: write it as host:port")

    @property
    def client(self) -> str:
        return self.name or socket.gethostname()

    @property
    def trainer_settings(self) -> TrainerSettings:
        return TrainerSettings(
            data=self.data,
            device=self.device,
            threads=self.threads,
            evaluate=self.evaluate,
            profile=Path(self.profile) if self.profile else None,
            cache_dir=self.state_dir / "profiles",
            memory_bytes=self.memory_mb * 10**6,
        )
