"""What ``[protection]`` of a run needs on an aggregator: the model that a round started from, and a secret."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedel import config
from fedel.job import Protection
from fedel.roles.aggregator import RoundFold
from fedel.serialisation import parse_json
from fedel.strategies.masked_fold import masked_spec
from fedel.strategies.protection import RoundStart, check
from fedel.types import Array, ModelSpec, Strategy, Tensors
from fedel.v1.aggregator_pb2 import ModelHeader
from fedel.wire.codec import spec_from_pb
from fedel_aggregator.private_files import write_private
from fedel_aggregator.versions import Versions

SECRET_FILE = "noise.key"
_SECRET_BYTES = 32


def protection_of(header: ModelHeader, strategy: Strategy, spec: ModelSpec) -> Protection:
    """The run's protection; ConfigError if it does not go with the method or the model."""
    table = parse_json(header.protection_json or "{}")
    protection = config.parse(Protection, table, "[protection]")
    check(strategy, spec, protection)
    return protection


class ProtectedFolds:
    """Makes the folds of one run."""

    def __init__(
        self, folder: Path, header: ModelHeader, strategy: Strategy, spec: ModelSpec, versions: Versions
    ) -> None:
        """``spec`` is this aggregator's part of the model."""
        self._strategy, self._spec, self._versions = strategy, spec, versions
        self._protection = protection_of(header, strategy, spec)
        self._share = spec.num_bytes / spec_from_pb(header.spec).num_bytes
        self._secret = _secret(folder / SECRET_FILE) if self._protection.noise_multiplier else b""
        self.comes_masked = self._protection.secure
        self.update_spec = masked_spec(spec) if self.comes_masked else spec
        """What updates must look like."""

    def empty(self, round_num: int, model: Tensors | None = None) -> RoundFold:
        """The fold of a round. It starts from ``model``, or from the version on disk that has its number."""
        model = model or _VersionTensors(self._versions, round_num)
        start = RoundStart(model, round_num, self._share, self._secret, self.comes_masked)
        return RoundFold(self._strategy, self._spec, self._protection, start)


class _VersionTensors(Mapping[str, Array]):
    """The tensors of a version, each read from its file when it is looked up."""

    def __init__(self, versions: Versions, version: int) -> None:
        self._versions, self._version = versions, version

    def __getitem__(self, name: str) -> Array:
        crc32 = self._versions.meta(self._version).crc32[name]
        with self._versions.open(self._version) as file:
            return file.tensor(name, crc32)

    def __iter__(self) -> Iterator[str]:
        with self._versions.open(self._version) as file:
            return iter(list(file.places))

    def __len__(self) -> int:
        return len(list(iter(self)))


def _secret(path: Path) -> bytes:
    """The run's secret, made once. Who has it can take the noise off again: only this process may read it."""
    if not path.exists():
        write_private(path, secrets.token_bytes(_SECRET_BYTES))
    return path.read_bytes()
