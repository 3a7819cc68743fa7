"""What the settings of a run need on an aggregator to fold its updates: earlier versions, and a secret."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from fedel import config
from fedel.core.compression import restored
from fedel.core.staleness import Staleness, caught_up
from fedel.job import Protection, Server
from fedel.roles.aggregator import RoundFold
from fedel.serialisation import parse_json
from fedel.strategies.masked_fold import masked_spec
from fedel.strategies.protection import RoundStart, check
from fedel.types import ModelSpec, SentUpdate, Strategy, Tensors, Update, UploadSettings
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


def upload_of(header: ModelHeader) -> UploadSettings:
    """How the run's updates are compressed; ConfigError if that is unknown here."""
    return config.parse(UploadSettings, parse_json(header.upload_json or "{}"), "[upload]")


def server_of(header: ModelHeader) -> Server:
    """What becomes of the mean of a round; ConfigError if that is unknown here."""
    return config.parse(Server, parse_json(header.server_json or "{}"), "[server]")


def staleness_of(header: ModelHeader) -> Staleness:
    """What the run does with late updates; ValueError if that makes no sense."""
    return Staleness.of(header.late_policy or "refuse", header.max_staleness, header.staleness_power)


class ProtectedFolds:
    """Makes the folds of one run, and gets the updates that go into them ready."""

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
        self.upload, self.staleness = upload_of(header), staleness_of(header)
        self._server = server_of(header)

    def empty(self, round_num: int, model: Tensors | None = None) -> RoundFold:
        """The fold of a round. It starts from ``model``, or from the version on disk that has its number."""
        model = model or self._versions.tensors(round_num)
        start = RoundStart(model, round_num, self._share, self._secret, self.comes_masked)
        return RoundFold(self._strategy, self._spec, self._protection, start, self._server)

    def ready(
        self, sent: SentUpdate, round_num: int, version: Callable[[int], Tensors] | None = None
    ) -> Update:
        """An update as the fold of a round takes it. Its client started from the version that has the number of
        its own round; ``version`` gives versions, otherwise they are read from the disk."""
        version = version or self._versions.tensors
        rounds_late, started = round_num - sent.report.round_num, version(sent.report.round_num)
        update = restored(self.upload, sent, started)
        if not rounds_late:
            return update
        return caught_up(update, self._spec, self.staleness.weight(rounds_late), started, version(round_num))


def _secret(path: Path) -> bytes:
    """The run's secret, made once. Who has it can take the noise off again: only this process may read it."""
    if not path.exists():
        write_private(path, secrets.token_bytes(_SECRET_BYTES))
    return path.read_bytes()
