"""Reads the directory of a run: ``config.toml``, ``result.json``, ``rounds.jsonl``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel import config
from fedel.errors import ConfigError
from fedel.records import ClientRecord, RoundRecord, RunResult


@dataclass(frozen=True)
class StoredRun:
    """A run on disk; a run that is still running has rounds but no result yet."""

    path: Path
    settings: dict[str, Any]
    result: RunResult | None
    rounds: list[RoundRecord]

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def strategy(self) -> str:
        """Name of the method for readers, wrappers first: ``fedprox(fedel)``."""
        return _label(self.settings.get("strategy", {}))

    def seconds(self) -> list[float]:
        """Time at the end of each round: the sum of the round latencies up to it."""
        times, total = [], 0.0
        for record in self.rounds:
            total += record.latency_seconds
            times.append(total)
        return times

    def accuracies(self) -> list[tuple[int, float, float]]:
        """Round, seconds and accuracy of every tested round."""
        return [
            (record.round, seconds, record.accuracy)
            for record, seconds in zip(self.rounds, self.seconds(), strict=True)
            if record.accuracy is not None
        ]

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds until the model first had this accuracy; ``None`` if it never had."""
        return next((seconds for _, seconds, reached in self.accuracies() if reached >= accuracy), None)

    def clients(self) -> list[str]:
        return sorted({entry.client for record in self.rounds for entry in record.clients})

    def per_client(self, client: str) -> list[tuple[int, ClientRecord]]:
        """Round number and entry of every round in which the client counted."""
        return [
            (record.round, entry)
            for record in self.rounds
            for entry in record.clients
            if entry.client == client
        ]

    def seconds_by_phase(self, num_rounds: int) -> dict[str, dict[str, float]]:
        """By client, the mean seconds of each phase over its part in the last rounds."""
        found: dict[str, list[dict[str, float]]] = {}
        for record in self.rounds[-num_rounds:]:
            for entry in record.clients:
                found.setdefault(entry.client, []).append(record.seconds_of(entry))
        return {
            client: {phase: sum(each[phase] for each in spent) / len(spent) for phase in spent[0]}
            for client, spent in sorted(found.items())
        }

    def mean_latency(self) -> float | None:
        return sum(r.latency_seconds for r in self.rounds) / len(self.rounds) if self.rounds else None

    def deviations(self) -> list[float]:
        """Time that counts divided by T_th, minus one, of every client and round."""
        return [deviation for record in self.rounds for deviation in record.deviations()]


def _label(table: dict[str, Any]) -> str:
    name = str(table.get("name", "?"))
    return f"{name}({_label(table['base'])})" if isinstance(table.get("base"), dict) else name


def load(path: str | Path) -> StoredRun:
    """Read the run in a directory."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run directory; `fedel runs` lists all runs")
    rounds_file = path / "rounds.jsonl"
    if not rounds_file.exists():
        raise ConfigError(
            f"{rounds_file}: missing; {path} is not a run directory, or its run never closed a round"
        )
    rounds = []
    for number, line in enumerate(rounds_file.read_bytes().splitlines(), start=1):
        try:
            rounds.append(RoundRecord.from_json(line, f"{rounds_file}, line {number}"))
        except ConfigError as error:
            raise ConfigError(f"{error}; delete the line to continue") from None
    result_file, config_file = path / "result.json", path / "config.toml"
    result = _result(result_file) if result_file.exists() else None
    settings = config.read(config_file) if config_file.exists() else {}
    return StoredRun(path, settings, result, rounds)


def _result(file: Path) -> RunResult:
    try:
        return RunResult.from_json(file.read_bytes(), str(file))
    except ConfigError as error:
        raise ConfigError(f"{error}; delete the file to continue without it") from None
