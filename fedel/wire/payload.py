"""Patches as raw little-endian bytes with a manifest, and back; no pickle and as few copies as possible.

A payload is the bytes of its tensors one after the other, in manifest order. So a single number says how much
of it has arrived, and a broken upload can resume from there.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedel import checksum
from fedel.core import compression
from fedel.errors import UpdateRefused
from fedel.types import PLAIN, Array, Change, ModelSpec, Patch, Role, TensorSpec, UploadSettings, Where
from fedel.v1 import model_pb2
from fedel.wire.codec import dtype_from_pb, dtype_to_pb

CHUNK_BYTES = 512 * 1024
_STORED: dict[str, np.dtype[Any]] = {"float32": np.dtype("<f4"), "uint64": np.dtype("<u8")}


@dataclass(frozen=True)
class Payload:
    """A manifest and its bytes, ready to be sent."""

    manifest: tuple[model_pb2.TensorManifest, ...]
    buffers: tuple[memoryview, ...]
    """Bytes of the payload in pieces; they are not copied before they are sent."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.manifest)

    @property
    def digest(self) -> str:
        return digest(self.manifest)

    def chunks(self, offset: int = 0, chunk_bytes: int = CHUNK_BYTES) -> Iterator[model_pb2.Chunk]:
        """The bytes of the payload from ``offset`` to the end, in as few chunks as possible: a model has many
        tensors that are small, and a message costs the same whatever it holds."""
        parts: list[memoryview] = []
        room = chunk_bytes
        for left in self._buffers_from(offset):
            while left:
                part, left = left[:room], left[room:]
                parts.append(part)
                room -= len(part)
                if not room:
                    yield model_pb2.Chunk(offset=offset, data=b"".join(parts))
                    offset, parts, room = offset + chunk_bytes, [], chunk_bytes
        if parts:
            yield model_pb2.Chunk(offset=offset, data=b"".join(parts))

    def _buffers_from(self, offset: int) -> Iterator[memoryview]:
        for buffer in self.buffers:
            yield buffer[min(offset, len(buffer)) :]
            offset = max(0, offset - len(buffer))


def digest(manifest: Sequence[model_pb2.TensorManifest]) -> str:
    """Identity of a payload: two payloads with the same digest hold the same bytes."""
    sha = hashlib.sha256()
    for entry in manifest:
        sha.update(entry.SerializeToString(deterministic=True))
    return sha.hexdigest()


def pack(patches: Mapping[str, Patch | Change]) -> Payload:
    """Convert patches to bytes without copying whole tensors."""
    manifest, buffers = [], []
    for name, patch in patches.items():
        if isinstance(patch, Patch):
            # A scalar has no axes; ascontiguousarray would add one.
            shape, values = np.shape(patch.values), np.ascontiguousarray(patch.values)
            pieces, dtype = [values.reshape(-1).view(np.uint8).data], str(values.dtype)
        else:
            shape, pieces, dtype = patch.shape, [patch.data.data], "float32"
        where = model_pb2.Where()
        if isinstance(patch.where, np.ndarray):
            where.bitmap = True
            pieces.insert(0, np.packbits(patch.where).data)
        elif patch.where is not None:
            # numpy takes the whole of every axis that an index does not name.
            rest = shape[len(patch.where) :]
            where = _where_to_pb((*patch.where, *(slice(0, size) for size in rest)))
        crc = 0
        for piece in pieces:
            crc = checksum.crc32(piece, crc)
        manifest.append(
            model_pb2.TensorManifest(
                name=name,
                dtype=dtype_to_pb(dtype),
                shape=shape,
                num_bytes=sum(len(piece) for piece in pieces),
                crc32=crc,
                where=where,
                compressed=isinstance(patch, Change),
            )
        )
        buffers += pieces
    return Payload(tuple(manifest), tuple(buffers))


def _where_to_pb(where: tuple[slice | Array, ...]) -> model_pb2.Where:
    if all(isinstance(part, slice) and not part.start and part.step in (None, 1) for part in where):
        return model_pb2.Where(prefix=[part.stop for part in where])  # type: ignore[union-attr]
    return model_pb2.Where(grid=[model_pb2.AxisIndex(indices=_indices(part)) for part in where])


def _indices(part: slice | Array) -> list[int]:
    """The positions along one axis: HeteroFL's rows next to its slices, or an open mesh."""
    if isinstance(part, slice):
        return list(range(part.stop))
    return [int(i) for i in part.reshape(-1)]


def check(
    manifest: Sequence[model_pb2.TensorManifest], spec: ModelSpec, upload: UploadSettings = PLAIN
) -> None:
    """Refuse a manifest that does not match the model, before any byte of its payload is accepted.

    ``upload`` says which compression it may have.
    """
    seen: set[str] = set()
    for entry in manifest:
        tensor = spec.by_name.get(entry.name)
        if tensor is None:
            raise UpdateRefused("unknown_tensor", f"the model has no tensor '{entry.name}'")
        if entry.name in seen:
            raise UpdateRefused("unknown_tensor", f"tensor '{entry.name}' occurs twice in one update")
        seen.add(entry.name)
        if dtype_from_pb(entry.dtype) != tensor.dtype:
            raise UpdateRefused("dtype", f"tensor '{entry.name}' is not {tensor.dtype}")
        shape = tuple(entry.shape)
        expected = _values_shape(entry, tensor)
        if expected is not None and shape != expected:
            raise UpdateRefused("shape", f"tensor '{entry.name}' is {shape}, not {expected}")
        num_bytes = _value_bytes(entry, tensor, upload) + ((tensor.size + 7) // 8 if entry.where.bitmap else 0)
        if entry.num_bytes != num_bytes:
            raise UpdateRefused(
                "size",
                f"tensor '{entry.name}' announces {entry.num_bytes} bytes, but its shape needs {num_bytes}",
            )


def _value_bytes(entry: model_pb2.TensorManifest, tensor: TensorSpec, upload: UploadSettings) -> int:
    size = math.prod(entry.shape)
    if not entry.compressed:
        return np.dtype(tensor.dtype).itemsize * size
    if upload.compression == "none" or tensor.role is Role.BUFFER:
        what = "statistics are" if tensor.role is Role.BUFFER else "updates of this run are"
        raise UpdateRefused("compressed", f"tensor '{entry.name}' is compressed: {what} sent as they are")
    return compression.num_bytes(upload, size)


def _values_shape(entry: model_pb2.TensorManifest, tensor: TensorSpec) -> tuple[int, ...] | None:
    """The shape that the values must have; ``None`` if only the bitmap says it."""
    where, full = entry.where, tensor.shape
    if where.bitmap:
        if len(entry.shape) != 1 or not 0 <= entry.shape[0] <= tensor.size:
            raise UpdateRefused("shape", f"tensor '{entry.name}' has more than {tensor.size} masked values")
        return None
    if where.grid:
        inside = len(where.grid) == len(full) and all(
            0 <= i < size for axis, size in zip(where.grid, full, strict=True) for i in axis.indices
        )
        if not inside or any(len(set(axis.indices)) != len(axis.indices) for axis in where.grid):
            raise UpdateRefused("shape", f"the indices of tensor '{entry.name}' do not fit {full}")
        return tuple(len(axis.indices) for axis in where.grid)
    if where.prefix:
        inside = len(where.prefix) == len(full) and all(
            0 < n <= size for n, size in zip(where.prefix, full, strict=True)
        )
        if not inside:
            raise UpdateRefused("shape", f"the slices of tensor '{entry.name}' do not fit {full}")
        return tuple(where.prefix)
    return full


def unpack(entry: model_pb2.TensorManifest, data: memoryview | bytes, shape: tuple[int, ...]) -> Patch | Change:
    """Convert one tensor's bytes to its patch; ``shape`` is the full tensor's. Checks length and checksum."""
    if len(data) != entry.num_bytes:
        raise UpdateRefused(
            "size", f"{len(data)} bytes of tensor '{entry.name}' are there instead of {entry.num_bytes}"
        )
    if checksum.crc32(data) != entry.crc32:
        raise UpdateRefused("checksum", f"tensor '{entry.name}' was damaged in transfer: send it again")
    view = memoryview(data)
    where: Where = None
    if entry.where.bitmap:
        size = math.prod(shape)
        bits = np.frombuffer(view[: (size + 7) // 8], np.uint8)
        where = np.unpackbits(bits, count=size).astype(bool).reshape(shape)
        view = view[(size + 7) // 8 :]
        if int(where.sum()) != entry.shape[0]:
            raise UpdateRefused("shape", f"the bitmap of tensor '{entry.name}' does not match its values")
    elif entry.where.grid:
        where = np.ix_(*(np.array(axis.indices, np.int64) for axis in entry.where.grid))
    elif entry.where.prefix:
        where = tuple(slice(0, n) for n in entry.where.prefix)
    if entry.compressed:
        return Change(np.frombuffer(view, np.uint8), tuple(entry.shape), where)
    values = np.frombuffer(view, _STORED[dtype_from_pb(entry.dtype)]).reshape(tuple(entry.shape))
    return Patch(values, where)
