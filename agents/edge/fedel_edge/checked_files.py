"""Files with a checksum over all of their content: what is damaged on disk is never taken for what was written.

A file is a head, a body, and an end with the lengths of both and the checksum. A damaged file is deleted, with
a line in the log: everything that an agent keeps can be downloaded or computed again.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedel import checksum
from fedel.files import open_atomic
from fedel.serialisation import parse_json
from fedel.types import Array, Tensors

_log = logging.getLogger(__name__)
_END = struct.Struct("<QQI8s")
"""Bytes of the head, bytes of the body, CRC-32 of head, body and both numbers, and the mark."""
_LENGTHS = struct.Struct("<QQ")
_MARK = b"FedEL-1\n"
PRIVATE = 0o600


def write(path: Path, head: bytes, body: Iterable[bytes | memoryview], *, durable: bool = True) -> None:
    """Replace the file, if ``durable`` so that it survives a power cut; only this user can read it."""
    num_bytes, crc = 0, checksum.crc32(head)
    with open_atomic(path, mode=PRIVATE, durable=durable) as file:
        file.write(head)
        for piece in body:
            file.write(piece)
            num_bytes, crc = num_bytes + len(piece), checksum.crc32(piece, crc)
        lengths = len(head), num_bytes
        file.write(_END.pack(*lengths, checksum.crc32(_LENGTHS.pack(*lengths), crc), _MARK))


def read(path: Path) -> tuple[bytes, memoryview] | None:
    """Head and body, in memory and free to be changed; ``None`` if the file is missing or damaged."""
    try:
        with path.open("rb") as file:
            content = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(content)
        return _parts(memoryview(content))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        drop(path, error)
        return None


def mapped(path: Path) -> tuple[bytes, memoryview] | None:
    """Like ``read``, but the body stays on disk and cannot be changed."""
    try:
        with path.open("rb") as file:
            return _parts(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        drop(path, error)
        return None


def drop(path: Path, error: Exception) -> None:
    """Delete a file whose content cannot be used."""
    _log.warning("%s is damaged (%s): it is deleted, and made again when it is needed", path, error)
    path.unlink(missing_ok=True)


def _parts(content: memoryview) -> tuple[bytes, memoryview]:
    begin = len(content) - _END.size
    if begin < 0:
        raise ValueError("it is cut off")
    head, body, crc, mark = _END.unpack(content[begin:])
    if mark != _MARK or head + body != begin:
        raise ValueError("it is cut off, or of another version")
    if checksum.crc32(_LENGTHS.pack(head, body), checksum.crc32(content[:begin])) != crc:
        raise ValueError("its checksum is wrong")
    return bytes(content[:head]), content[head:begin]


def write_record(path: Path, record: Mapping[str, Any], tensors: Tensors, *, durable: bool = True) -> None:
    """Values that JSON knows, and tensors."""
    layout = [(name, str(values.dtype), list(np.shape(values))) for name, values in tensors.items()]
    head = json.dumps({"record": record, "tensors": layout}).encode()
    write(
        path,
        head,
        (np.ascontiguousarray(values).reshape(-1).view(np.uint8).data for values in tensors.values()),
        durable=durable,
    )


def read_record(path: Path) -> tuple[dict[str, Any], dict[str, Array]] | None:
    """What ``write_record`` wrote; ``None`` if it is missing or damaged."""
    parts = read(path)
    if parts is None:
        return None
    tensors: dict[str, Array] = {}
    try:
        head, body = parse_json(parts[0]), parts[1]
        for name, dtype, shape in head["tensors"]:
            num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            piece, body = body[:num_bytes], body[num_bytes:]
            tensors[name] = np.frombuffer(piece, dtype).reshape(shape)
        return dict(head["record"]), tensors
    except (ValueError, KeyError, TypeError, OverflowError) as error:  # of another version of FedEL
        drop(path, error)
        return None
