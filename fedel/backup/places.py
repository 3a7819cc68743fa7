"""What a backup holds, and where it belongs on this machine, as the configurations of the servers say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedel_aggregator.config import AggregatorConfig
from fedel_coordinator.config import CoordinatorConfig

DATABASE, AUTHORITY, CERTS = "database.sqlite", "authority", "certs"
AGGREGATOR = "aggregator-"


@dataclass(frozen=True)
class Places:
    """The servers of this machine; those on other machines are backed up there."""

    coordinator: CoordinatorConfig | None = None
    aggregators: tuple[AggregatorConfig, ...] = ()

    @property
    def authority(self) -> Path | None:
        named = self.coordinator.enrolment.authority if self.coordinator else ""
        return Path(named) if named else None

    def data(self) -> dict[str, Path]:
        """The aggregators' folders, by part of the backup."""
        return {f"{AGGREGATOR}{index}": config.data_dir for index, config in enumerate(self.aggregators)}

    def certs(self) -> dict[str, Path]:
        """The folders with the servers' own certificates, by part of the backup."""
        named = {f"{AGGREGATOR}{index}": config.tls.dir for index, config in enumerate(self.aggregators)}
        if self.coordinator is not None:
            named["coordinator"] = self.coordinator.tls.dir
        return {f"{CERTS}-{name}": Path(folder) for name, folder in named.items() if folder}
