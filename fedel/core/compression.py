"""Compressed changes: what an update sends in place of a tensor's new values, and what it keeps for later.

Sent is the change, trained value minus the value that the round started from, and what is lost by that is not
lost for good: the *residual* (change plus last residual minus what was sent) is added to the tensor's next
change. This is the error feedback of Seide et al. (2014) and Karimireddy et al. (2019). The forms, all
little-endian:

* ``fp16``: every change in half precision;
* ``int8``: a float32 scale, then every change divided by it as a whole number from -127 to 127;
* ``topk``: the places of the largest changes, as one bit per value or as one uint32 per place, whichever is
  shorter; then these changes as float32.

Client, aggregator and simulation restore the same bits: a value takes at most one multiplication and one
addition in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from fedel.errors import UpdateRefused
from fedel.types import (
    Array,
    Change,
    ModelSpec,
    Patch,
    Role,
    SentUpdate,
    Tensors,
    TensorSpec,
    Update,
    UploadSettings,
    Where,
)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_HALF = float(np.finfo(np.float16).max)
_LEVELS = 127
_SCALE_BYTES = 4
_PLACE_BYTES = 4
_VALUE_BYTES = 4


def num_bytes(upload: UploadSettings, size: int) -> int:
    """Bytes of a tensor, or of a part of it, with this many values.

    >>> [num_bytes(UploadSettings(name), 1000) for name in ("none", "fp16", "int8", "topk")]
    [4000, 2000, 1004, 525]
    >>> num_bytes(UploadSettings("topk", share=0.01), 1000)
    80
    """
    match upload.compression:
        case "fp16":
            return 2 * size
        case "int8":
            return _SCALE_BYTES + size
        case "topk":
            count = _num_kept(upload, size)
            return min(_bitmap_bytes(size), _PLACE_BYTES * count) + _VALUE_BYTES * count
        case _:
            return _VALUE_BYTES * size


def sent_bytes(upload: UploadSettings, tensor: TensorSpec) -> int:
    """Bytes of a whole tensor in an update; statistics are sent as they are.

    >>> weight = TensorSpec("a", 1, (10, 100))
    >>> sent_bytes(UploadSettings("int8"), weight), sent_bytes(UploadSettings(), weight)
    (1004, 4000)
    >>> sent_bytes(UploadSettings("int8"), TensorSpec("a", 1, (10, 100), Role.BUFFER))
    4000
    """
    plain = upload.compression == "none" or tensor.role is Role.BUFFER
    return tensor.num_bytes if plain else num_bytes(upload, tensor.size)


def compress(upload: UploadSettings, change: Floats) -> Bytes:
    """A change, which must be finite, in the run's form."""
    flat = change.reshape(-1)
    match upload.compression:
        case "fp16":
            return _bytes_of(np.clip(flat, -_LARGEST_HALF, _LARGEST_HALF).astype("<f2"))
        case "int8":
            return _whole_numbers(flat)
        case "topk":
            return _largest(flat, _num_kept(upload, flat.size))
        case _:
            return _bytes_of(flat)


def restore(upload: UploadSettings, size: int, data: Bytes) -> Floats:
    """The changes of this many values, as sent. ``UpdateRefused`` for bytes that ``compress`` never makes."""
    if len(data) != num_bytes(upload, size):
        raise UpdateRefused("size", f"{len(data)} bytes are no change of {size} values as {upload.compression}")
    match upload.compression:
        case "fp16":
            return data.view("<f2").astype(np.float32)
        case "int8":
            scale, levels = data[:_SCALE_BYTES].view("<f4").astype(np.float32), data[_SCALE_BYTES:]
            if not (np.isfinite(scale).all() and np.all(scale >= 0)):
                raise UpdateRefused("not_finite", f"the scale of its change is {scale[0]}")
            with np.errstate(over="ignore"):  # what is not finite then is refused like any other update
                return levels.view(np.int8).astype(np.float32) * scale
        case "topk":
            count = _num_kept(upload, size)
            end = len(data) - _VALUE_BYTES * count
            change = np.zeros(size, np.float32)
            change[_places(data[:end], size, count)] = data[end:].view("<f4")
            return change
        case _:
            return data.view("<f4").astype(np.float32)


def _bytes_of(values: Array) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _whole_numbers(flat: Floats) -> Bytes:
    largest = float(np.abs(flat).max(initial=0))
    scale = np.float32(largest / _LEVELS)
    if float(scale) * _LEVELS > _LARGEST:
        scale = np.nextafter(scale, np.float32(0))  # rounded up, the largest level would not be finite
    levels = np.rint(flat / scale) if scale > 0 else np.zeros_like(flat)
    whole = np.clip(levels, -_LEVELS, _LEVELS).astype(np.int8)
    return np.concatenate([_bytes_of(np.array([scale], "<f4")), whole.view(np.uint8)])


def _num_kept(upload: UploadSettings, size: int) -> int:
    return min(size, max(1, math.ceil(upload.share * size)))


def _bitmap_bytes(size: int) -> int:
    return -(-size // 8)


def _largest(flat: Floats, count: int) -> Bytes:
    """Of equally large changes the first ones count, so that the choice does not depend on how numpy sorts."""
    kept = np.zeros(flat.size, bool)
    if count:
        sizes = np.abs(flat)
        smallest = np.partition(sizes, flat.size - count)[flat.size - count]
        kept = sizes > smallest
        kept[np.flatnonzero(sizes == smallest)[: count - int(kept.sum())]] = True
    if _PLACE_BYTES * count < _bitmap_bytes(flat.size):
        places = _bytes_of(np.flatnonzero(kept).astype("<u4"))
    else:
        places = np.packbits(kept)
    return np.concatenate([places, _bytes_of(flat[kept].astype("<f4"))])


def _places(data: Bytes, size: int, count: int) -> NDArray[np.intp]:
    if _PLACE_BYTES * count < _bitmap_bytes(size):
        places = data.view("<u4").astype(np.intp)
        if places[-1] >= size or np.any(np.diff(places) <= 0):
            raise UpdateRefused("shape", f"the places of its changes are not among its {size} values, in order")
        return places
    kept = np.flatnonzero(np.unpackbits(data, count=size))
    if kept.size != count:
        raise UpdateRefused("shape", f"the bitmap of its change has {kept.size} places, not {count}")
    return kept


def compress_update(
    upload: UploadSettings, spec: ModelSpec, update: Update, model: Tensors, residuals: Tensors
) -> tuple[SentUpdate, dict[str, Array]]:
    """What a client sends in place of an update, and the residuals that it keeps if that is accepted.

    Statistics are sent as they are. So is what is not finite: the fold refuses it, as it does without
    compression. A tensor that was not trained keeps its residual.
    """
    after = dict(residuals)
    if upload.compression == "none":
        return SentUpdate(update.patches, update.report), after
    patches: dict[str, Patch | Change] = {}
    for name, patch in update.patches.items():
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = np.asarray(patch.values - _part(model[name], patch.where), np.float32)
            if name in residuals:
                wanted = wanted + _part(residuals[name], patch.where)
        if spec.by_name[name].role is Role.BUFFER or not np.isfinite(wanted).all():
            patches[name] = patch
            continue
        data = compress(upload, wanted)
        left = wanted - restore(upload, wanted.size, data).reshape(wanted.shape)
        patches[name] = Change(data, wanted.shape, patch.where)
        if patch.where is None:
            after[name] = left
        else:
            after[name] = np.array(residuals.get(name, np.zeros(spec.by_name[name].shape, np.float32)))
            after[name][patch.where] = left
    return SentUpdate(patches, update.report), after


def _part(values: Array, where: Where) -> Array:
    return values if where is None else values[where]


class RestoredPatches(Mapping[str, Patch]):
    """The patches of an update. A compressed one is restored whenever it is looked up, so that a fold that
    takes one tensor after the other never has a whole model in memory."""

    def __init__(self, upload: UploadSettings, patches: Mapping[str, Patch | Change], model: Tensors) -> None:
        self._upload, self._patches, self._model = upload, patches, model

    def __getitem__(self, name: str) -> Patch:
        patch = self._patches[name]
        if isinstance(patch, Patch):
            return patch
        try:
            change = restore(self._upload, math.prod(patch.shape), patch.data).reshape(patch.shape)
        except UpdateRefused as error:
            raise UpdateRefused(error.reason, f"tensor '{name}': {error}") from None
        with np.errstate(over="ignore"):
            values = np.asarray(_part(self._model[name], patch.where) + change, np.float32)
        return Patch(values, patch.where)

    def __iter__(self) -> Iterator[str]:
        return iter(self._patches)

    def __len__(self) -> int:
        return len(self._patches)


def restored(upload: UploadSettings, sent: SentUpdate, model: Tensors) -> Update:
    """The update that was sent; ``model`` is the version that its client started from."""
    return Update(RestoredPatches(upload, sent.patches, model), sent.report)
