"""Writes a run as TensorBoard event files without TensorBoard: the format is a few bytes around a few fields.

A file is a list of records: length, checksum of the length, data, checksum of the data (TFRecord). The data is
an ``Event`` message: 1 wall time, 2 step, 3 file version, 5 summary; a summary holds 1 values: 1 tag, 2 number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from fedel.records import ClientRecord, RoundRecord
from fedel.report.runs import StoredRun

VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78
_SCALARS: Mapping[str, Callable[[RoundRecord], float | None]] = {
    "model/accuracy": lambda r: r.accuracy,
    "model/test_loss": lambda r: r.test_loss,
    "model/train_loss": lambda r: r.loss,
    "round/latency_seconds": lambda r: r.latency_seconds,
    "round/num_updates": lambda r: r.num_updates,
    "round/bytes_up": lambda r: r.bytes_up,
    "round/bytes_down": lambda r: r.bytes_down,
    "round/o1": lambda r: r.o1,
    "round/budget_seconds": lambda r: r.budget_seconds,
}
_OF_CLIENTS: Mapping[str, Callable[[ClientRecord], float | None]] = {
    "deviation": lambda r: r.deviation,
    "train_seconds": lambda r: r.train_seconds,
    "selected_tensors": lambda r: r.num_selected,
}


def write(run: StoredRun, directory: Path) -> Path:
    """Write a run into a new folder below ``directory``; returns the file. Steps are rounds, from 1."""
    folder = directory / run.name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("events.out.tfevents.*.fedel"):
        old.unlink()  # otherwise TensorBoard would draw both
    first = _times(run)[0] if run.rounds else 0.0
    file = folder / f"events.out.tfevents.{int(first):010d}.fedel"
    with file.open("wb") as stream:
        _record(stream, _event(first, 0, _text(3, VERSION)))
        for record, time in zip(run.rounds, _times(run), strict=True):
            values = b"".join(_message(1, _text(1, tag) + _float(2, value)) for tag, value in scalars(record))
            _record(stream, _event(time, record.round + 1, _message(5, values)))
    return file


def scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """Tags and numbers of one round; values that were not measured are left out."""
    for tag, figure in _SCALARS.items():
        if (value := figure(record)) is not None:
            yield tag, value
    for phase, seconds in record.phases.items():
        yield f"phase_seconds/{phase}", seconds
    for entry in record.clients:
        for tag, of_client in _OF_CLIENTS.items():
            if (value := of_client(entry)) is not None:
                yield f"client_{tag}/{entry.client}", value
        for edge, block in zip(("end", "front"), entry.window or (), strict=False):
            yield f"client_window_{edge}/{entry.client}", block


def _times(run: StoredRun) -> list[float]:
    """Unix time at which each round closed; in a simulation, seconds of the virtual clock."""
    begin = run.rounds[0].opened_at if run.rounds else 0.0
    return [begin + seconds for seconds in run.seconds()]


def _record(stream: BinaryIO, data: bytes) -> None:
    length = struct.pack("<Q", len(data))
    stream.write(length + _checksum(length) + data + _checksum(data))


def _event(wall_time: float, step: int, content: bytes) -> bytes:
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + _varint(step) + content


def _message(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _varint(value: int) -> bytes:
    """
    >>> _varint(300).hex()
    'ac02'
    """
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes(data) + bytes([value])


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    value = 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ _TABLE[(value ^ byte) & 255]
    return value ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    """Masked as the format requires: a checksum over data that contains checksums is weak."""
    value = crc32c(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)
