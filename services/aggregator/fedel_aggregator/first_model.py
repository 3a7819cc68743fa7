"""A run's first model, while it is being received."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedel.errors import ConfigError, UpdateRefused
from fedel.files import sync_directory, write_atomic
from fedel.v1.aggregator_pb2 import ModelHeader
from fedel.wire import payload
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import HEADER_FILE, ShardRun, shard_spec
from fedel_aggregator.tensor_file import TensorWriter, closed_on_error
from fedel_aggregator.versions import Meta, Versions


class FirstModel:
    """Version 0 of a new run. The run exists once its header is on disk, which is the very last step."""

    def __init__(
        self, folder: Path, header: ModelHeader, recycled: RecycledFiles, keep_updates: int = 0
    ) -> None:
        self._folder, self._header, self._recycled = folder, header, recycled
        self._keep_updates = keep_updates
        _check(header)
        shutil.rmtree(folder, ignore_errors=True)
        self._versions = Versions(folder / "versions")
        self._handle = os.open(self._versions.path(0), os.O_RDWR | os.O_CREAT, 0o644)
        shapes = [(entry.name, tuple(entry.shape)) for entry in header.tensors]
        with closed_on_error(self._handle):
            self._writer = TensorWriter(self._handle, shapes)
        self.num_bytes = sum(entry.num_bytes for entry in header.tensors)
        self.received = 0

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.received += self._writer.put_bytes(self.received, *pieces)

    def close(self) -> None:
        os.close(self._handle)

    def finish(self) -> ShardRun:
        """Check every tensor, and make the run."""
        os.fsync(self._handle)
        with self._versions.open(0) as file:
            for entry in self._header.tensors:
                values = file.tensor(entry.name)
                payload.unpack(entry, values.reshape(-1).view(np.uint8).data, values.shape)
                if not np.isfinite(values).all():
                    raise UpdateRefused(
                        "not_finite", f"tensor '{entry.name}' of the first model contains NaN or Inf"
                    )
        crc32 = {entry.name: entry.crc32 for entry in self._header.tensors}
        self._versions.publish(Meta(0, crc32, dict.fromkeys(crc32, 0)))
        (self._folder / "rounds").mkdir(exist_ok=True)
        write_atomic(self._folder / HEADER_FILE, self._header.SerializeToString(deterministic=True))
        sync_directory(self._folder.parent)
        return ShardRun(self._folder, self._recycled, self._keep_updates)


def _check(header: ModelHeader) -> None:
    try:
        shard_spec(header)
    except ConfigError as error:
        raise UpdateRefused("header", str(error)) from None
    except ValueError as error:
        raise UpdateRefused("header", f"strategy_json or protection_json is not valid JSON: {error}") from None
