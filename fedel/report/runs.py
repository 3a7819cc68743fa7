"""Reads the directory of a run: ``config.toml``, ``result.json``, ``rounds.jsonl``, ``exits.json``."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedel import config
from fedel.errors import ConfigError
from fedel.records import ClientRecord, ExitTable, RoundRecord, RunResult
from fedel.report import curves
from fedel.serialisation import parse_json

_METHODS = {
    "depthfl": "DepthFL",
    "elastictrainer": "ElasticTrainer",
    "fedavg": "FedAvg",
    "fedel": "FedEL",
    "fednova": "FedNova",
    "fedprox": "FedProx",
    "fiarse": "FIARSE",
    "heterofl": "HeteroFL",
    "pyramidfl": "PyramidFL",
    "timelyfl": "TimelyFL",
}
"""Names of the methods as their papers write them."""
_PROBING = ("fedel", "elastictrainer")
_FILES = ("rounds.jsonl", "result.json", "config.toml")
"""A directory with one of these is that of a run."""
MAX_HEAD_BYTES = 100_000_000
"""Of a safetensors file, as its own reader has it."""


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
        """Name of the method as in a job, wrappers first: ``fedprox(fedel)``."""
        return _label(self.settings.get("strategy", {}))

    @property
    def method(self) -> str:
        """Name of the method for readers: ``FedProx(FedEL)``."""
        return _label(self.settings.get("strategy", {}), _METHODS)

    @property
    def phase(self) -> str:
        return self.result.phase if self.result else "unfinished"

    @property
    def is_virtual(self) -> bool:
        """Whether its seconds are those of a simulation."""
        if self.result and self.result.virtual_seconds is not None:
            return True
        # Only a simulation splits the data itself.
        return "partition" in self.settings or any(record.wall_seconds is not None for record in self.rounds)

    @property
    def scope(self) -> str:
        """What T_th counts, and the seconds of a simulation too."""
        return self.rounds[-1].scope if self.rounds else self.result.scope if self.result else ""

    @property
    def has_network(self) -> bool:
        """Whether transfers take time in a simulation."""
        network = self.settings.get("network", {})
        return isinstance(network, dict) and any(network.values())

    @property
    def num_clients(self) -> int:
        """Clients of the fleet where the settings say it, and otherwise those that took part."""
        partition = self.settings.get("partition", {})
        known = partition.get("num_clients", 0) if isinstance(partition, dict) else 0
        return known if isinstance(known, int) and known > 0 else len(self.clients())

    @cached_property
    def num_classes(self) -> int | None:
        """Outputs of the model, from the shapes in ``model.safetensors``; ``None`` if they do not say it."""
        shapes = _shapes(self.path / "model.safetensors")
        last = shapes.get(self.result.tensors[-1], [0])[:1] if self.result and self.result.tensors else []
        exits = [shape[:1] for name, shape in shapes.items() if name.startswith("exits.")]
        return last[0] if last in exits and last[0] > 1 else None

    @cached_property
    def exits(self) -> ExitTable | None:
        """What `fedel exits` measured; ``None`` where it did not, or the file is damaged."""
        file = self.path / "exits.json"
        try:
            return ExitTable.from_json(file.read_bytes()) if file.exists() else None
        except (OSError, ConfigError):
            return None

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

    def curve(self) -> list[tuple[float, float]]:
        """Seconds and accuracy of every test, smoothed."""
        return curves.smoothed(self.tests())

    def means(self) -> list[float]:
        """The accuracy of every test, averaged with the few before it."""
        return curves.in_a_row([accuracy for _, _, accuracy in self.accuracies()])

    def tests(self) -> list[tuple[float, float]]:
        """Seconds and accuracy of every test."""
        return [(seconds, accuracy) for _, seconds, accuracy in self.accuracies()]

    @property
    def is_at_chance(self) -> bool:
        """Whether its last tests are no better than guessing. Where the number of classes is not known, no."""
        means = self.means()
        return bool(means and self.num_classes and curves.is_at_chance(means[-1], self.num_classes))

    def clients(self) -> list[str]:
        return sorted({entry.client for record in self.rounds for entry in record.clients})

    def device_types(self) -> dict[str, str]:
        """By client; empty for one that did not say it."""
        return {entry.client: entry.device_type for record in self.rounds for entry in record.clients}

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

    @property
    def has_probe_on_top(self) -> bool:
        """Whether clients probe importance in time that T_th has no room for."""
        table = self.settings.get("strategy", {})
        while isinstance(table, dict) and "base" in table:
            table = table["base"]
        probes = isinstance(table, dict) and table.get("name") in _PROBING
        return probes and self.scope != "round" and not table.get("probe_in_budget", False)

    @property
    def drifts(self) -> bool:
        """Whether simulated devices become slower or faster than their profiles."""
        faults = self.settings.get("faults", {})
        return isinstance(faults, dict) and faults.get("drift_factor", 1.0) != 1.0

    def mean_beyond_plan(self) -> float | None:
        """By how much clients took longer than planned, in shares of T_th."""
        clients = [client for record in self.rounds for client in record.clients]
        beyond = [
            client.deviation - client.predicted_deviation
            for client in clients
            if client.deviation is not None and client.predicted_deviation is not None
        ]
        return sum(beyond) / len(beyond) if beyond else None


def _label(table: Any, names: Mapping[str, str] | None = None) -> str:
    if not isinstance(table, dict):
        return "?"
    name = str(table.get("name", "?"))
    name = (names or {}).get(name, name)
    return f"{name}({_label(table['base'], names)})" if isinstance(table.get("base"), dict) else name


def _shapes(file: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a safetensors file, from its head; empty if it cannot be read."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            head = parse_json(stream.read(size)) if size < MAX_HEAD_BYTES else {}
        shapes = {name: entry["shape"] for name, entry in head.items() if "shape" in entry}
        return {name: list(map(int, shape)) for name, shape in shapes.items()}
    except (OSError, ValueError, struct.error, TypeError, AttributeError):
        return {}


def find(directory: Path) -> list[Path]:
    """The directories of runs in a directory."""
    return sorted({file.parent for name in _FILES for file in directory.glob(f"*/{name}")})


def load(path: str | Path) -> StoredRun:
    """Read the run in a directory."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such run directory; `fedel runs` lists all runs")
    if not any((path / name).exists() for name in _FILES):
        raise ConfigError(
            f"{path} is not the directory of a run: it has none of {', '.join(_FILES)}; "
            "`fedel runs` lists all runs"
        )
    rounds = _rounds(path / "rounds.jsonl")
    result_file, config_file = path / "result.json", path / "config.toml"
    result = _result(result_file) if result_file.exists() else None
    settings = config.read(config_file) if config_file.exists() else {}
    return StoredRun(path, settings, result, rounds)


def _rounds(file: Path) -> list[RoundRecord]:
    """The closed rounds: none if the file is missing; without a last line that is still being written."""
    *lines, rest = file.read_bytes().split(b"\n") if file.exists() else [b""]
    rounds = []
    for number, line in enumerate([*lines, *_complete(rest)], start=1):
        try:
            rounds.append(RoundRecord.from_json(line, f"{file}, line {number}"))
        except ConfigError as error:
            raise ConfigError(f"{error}; delete the line to continue") from None
    return rounds


def _complete(line: bytes) -> list[bytes]:
    """A last line without its end, if all of it is there."""
    try:
        return [line] if line and isinstance(parse_json(line), dict) else []
    except ValueError:
        return []


def _result(file: Path) -> RunResult:
    try:
        return RunResult.from_json(file.read_bytes(), str(file))
    except ConfigError as error:
        raise ConfigError(f"{error}; delete the file to continue without it") from None
