"""A run's first model, while it is being received."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedel.errors import UpdateRefused
from fedel.files import sync_directory
from fedel.v1.aggregator_pb2 import ModelHeader
from fedel_aggregator.errors import Damaged
from fedel_aggregator.private_files import make_folder, naming, open_private, write_private
from fedel_aggregator.recycled_files import RecycledFiles
from fedel_aggregator.run import ShardRun
from fedel_aggregator.run_header import HEADER_FILE, shard_spec
from fedel_aggregator.tensor_file import TensorWriter
from fedel_aggregator.versions import Meta, Versions


class FirstModel:
    """Version 0 of a new run. The run exists once its header is on disk, which is the very last step."""

    def __init__(
        self, folder: Path, header: ModelHeader, recycled: RecycledFiles, keep_updates: int = 0
    ) -> None:
        self._folder, self.header, self._recycled = folder, header, recycled
        self._keep_updates = keep_updates
        spec = shard_spec(header)
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder)
        self._versions = Versions(folder / "versions", spec)
        self._path = self._versions.path(0)
        self._handle = open_private(self._path)
        try:
            with naming(self._path):
                shapes = [(entry.name, tuple(entry.shape)) for entry in header.tensors]
                self._writer = TensorWriter(self._handle, shapes)
        except BaseException:
            self.close()
            raise
        self.num_bytes = sum(entry.num_bytes for entry in header.tensors)
        self.received = 0

    def append(self, pieces: Sequence[bytes | memoryview]) -> None:
        with naming(self._path):
            self.received += self._writer.put_bytes(self.received, *pieces)

    def close(self) -> None:
        os.close(self._handle)

    def finish(self) -> ShardRun:
        """Check every tensor, and make the run."""
        with naming(self._path):
            os.fsync(self._handle)
        with self._versions.open(0) as file:
            for entry in self.header.tensors:
                try:
                    values = file.tensor(entry.name, entry.crc32)
                except Damaged:
                    raise UpdateRefused(
                        "checksum", f"tensor '{entry.name}' was damaged in transfer: send it again"
                    ) from None
                if not np.isfinite(values).all():
                    raise UpdateRefused(
                        "not_finite", f"tensor '{entry.name}' of the first model contains NaN or Inf"
                    )
        crc32 = {entry.name: entry.crc32 for entry in self.header.tensors}
        self._versions.publish(Meta(0, crc32, dict.fromkeys(crc32, 0)))
        make_folder(self._folder / "rounds")
        write_private(self._folder / HEADER_FILE, self.header.SerializeToString(deterministic=True))
        sync_directory(self._folder.parent)
        return ShardRun(self._folder, self._recycled, self._keep_updates)
