"""Turn valid inputs into hostile ones: bytes, JSON-like values, and protobuf messages field by field.

Everything comes from the ``random.Random`` that is passed in, so that a case can be made again from its number.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message

from fedel import config

INTEGERS = (
    -1,
    0,
    1,
    2,
    127,
    128,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
)
FLOATS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 1e-308, -0.0, 0.0, -1.0, 1e300, 1e16, 0.5)
VALUES = (math.nan, math.inf, -math.inf, 3e38, -3e38, 1e30, 4_194_303.0, 1e-45, -0.0, 1e9)
STRINGS = (
    *(
        "",
        " ",
        "0",
        "-1",
        "NaN",
        "null",
        "true",
        "x" * 300,
        "x" * 100_000,
        "\0",
        "a\0b",
        "\n",
        "\r\n{}",
        "\x1b[2J",
    ),
    *(
        "\u202e",
        "\ud7ff\ue000",
        "\U0010ffff",
        "é" * 200,
        "..",
        "../../etc/passwd",
        "/",
        "a/b",
        "C:\\",
        "%2e%2e",
        "%s%n",
    ),
    *("[/red]", "<script>", "'; --", "__class__", "float32", "fedel", "client-0", "one.weight"),
)
MANY = 3_000
MOST_BYTES = 8_000_000
"""What one mutation may add: a case has to fit the limit on memory, or it says nothing about the reader."""
_LIMITS = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
    Field.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def mutate_bytes(rng: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """One to three changes: flip, overwrite, insert, cut, repeat, truncate, splice with another input."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        _change_bytes(rng, changed, others)
    return bytes(changed)


def _change_bytes(rng: Random, data: bytearray, others: Sequence[bytes]) -> None:
    # Headers are at the beginning: half of the changes are there.
    size = len(data) if rng.random() < 0.5 else min(len(data), 64)
    at = rng.randrange(size) if size else 0
    length = rng.choice((1, 2, 4, 8, 16, 64))
    match rng.randrange(9):
        case 0 if data:
            data[at] ^= 1 << rng.randrange(8)
        case 1 if data:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        case 2:
            number = rng.choice(INTEGERS) & (2**64 - 1)
            order, width = rng.choice("<>"), rng.choice("HIQ")
            code = struct.pack(order + width, number & (256 ** struct.calcsize(width) - 1))
            data[at : at + len(code)] = code
        case 3:
            data[at:at] = rng.randbytes(length)
        case 4:
            del data[at : at + length]
        case 5:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 100))
        case 6:
            del data[at:]
        case 7 if others:
            other = rng.choice(others)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        case _:
            data[at : at + length] = bytes([rng.choice((0, 0xFF, 0x80, 0x39))]) * rng.choice(
                (length, 20, 5_000)
            )


def mutate_values(rng: Random, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Bytes of float32: a few of them become values that no sound model holds; sometimes any bytes change."""
    if rng.random() < 0.3 or len(data) < 4:
        return mutate_bytes(rng, data)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 3, 20))):
        at = 4 * rng.randrange(len(data) // 4)
        changed[at : at + 4] = struct.pack("<f", rng.choice(VALUES))
    return bytes(changed)


def mutate_json(rng: Random, value: Any) -> Any:
    """A copy with one to three of its nodes changed, taken away, repeated or moved."""
    changed = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        changed = _change_node(rng, changed)
    return changed


def _change_node(rng: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[rng.choice(STRINGS)] = value.pop(key)
            case 2:
                value[key + rng.choice(("x", " ", "_"))] = value[key]
            case _:
                value[key] = _change_node(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                del value[at]
            case 1:
                value.insert(at, value[at])
            case 2:
                rng.shuffle(value)
            case 3 if rng.random() < 0.1:
                value.extend([value[at]] * _times(json.dumps(value[at], default=str)))
            case _:
                value[at] = _change_node(rng, value[at])
        return value
    return odd_value(rng, value)


def odd_value(rng: Random, value: Any = None) -> Any:
    """Something else in the place of ``value``, half of the time of its own type."""
    if rng.random() < 0.5:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return rng.choice((*INTEGERS, -(2**63), 2**64, 10**30, value + 1, -value))
        if isinstance(value, float):
            return rng.choice((*FLOATS, -value))
        if isinstance(value, str):
            return rng.choice((*STRINGS, value[:-1], value + "x", value.upper()))
    nested: Any = 1
    for _ in range(rng.choice((2, 50))):
        nested = [nested]
    return rng.choice(
        (None, True, 0, -1, 2**63, 10**400, rng.choice(FLOATS), rng.choice(STRINGS), [], {}, nested)
    )


def json_case(rng: Random, valid: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A JSON text: usually its structure is changed, else its bytes; sometimes it is nested without end."""
    draw = rng.random()
    if draw < 0.02:
        return rng.choice((b"[", b'{"a":', b'{"round":[')) * rng.choice((900, 100_000))
    if draw < 0.3:
        return mutate_bytes(rng, valid, others)
    try:
        value = json.loads(valid)
    except (ValueError, RecursionError):
        return mutate_bytes(rng, valid, others)
    return json.dumps(mutate_json(rng, value)).encode()


def toml_case(rng: Random, valid: bytes, others: Sequence[bytes] = ()) -> bytes:
    """A TOML text, in the same way."""
    draw = rng.random()
    if draw < 0.02:
        return b"a = " + b"[" * rng.choice((900, 100_000))
    if draw < 0.3:
        return mutate_bytes(rng, valid, others)
    try:
        table = config.tomllib.loads(valid.decode())
    except (ValueError, RecursionError):
        return mutate_bytes(rng, valid, others)
    changed = mutate_json(rng, table)
    return config.write(changed if isinstance(changed, dict) else {"a": changed}).encode("utf-8", "replace")


def message_case(kind: type[Message]) -> Callable[[Random, bytes, Sequence[bytes]], bytes]:
    """How inputs that are messages of this kind are changed: by field, and every fourth also by byte."""

    def mutated(rng: Random, valid: bytes, others: Sequence[bytes] = ()) -> bytes:
        draw = rng.random()
        try:
            message = kind.FromString(valid)
        except DecodeError:
            return mutate_bytes(rng, valid, others)
        if draw < 0.85:
            for _ in range(rng.choice((1, 1, 2, 4))):
                mutate_message(rng, message)
        data = message.SerializeToString()
        return mutate_bytes(rng, data, others) if draw > 0.75 else data

    return mutated


def mutate_message(rng: Random, message: Message) -> None:
    """Change one field, of the message itself or of one inside it."""
    if not message.DESCRIPTOR.fields:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    choice = field.containing_oneof
    if choice and (chosen := message.WhichOneof(choice.name)) and rng.random() < 0.95:
        # Setting another kind would lose all that is in the message.
        field = message.DESCRIPTOR.fields_by_name[chosen]
    name = field.name
    if rng.random() < 0.08:
        message.ClearField(name)
    elif _is_map(field):
        _mutate_map(rng, field, getattr(message, name))
    elif field.is_repeated:
        _mutate_repeated(rng, field, getattr(message, name))
    elif field.cpp_type == Field.CPPTYPE_MESSAGE:
        inner = getattr(message, name)
        inner.SetInParent()
        mutate_message(rng, inner)
    else:
        setattr(message, name, odd_scalar(rng, field, getattr(message, name)))


def _times(value: Any) -> int:
    """How often a value may be repeated."""
    size = (
        len(value) if isinstance(value, str | bytes) else value.ByteSize() if isinstance(value, Message) else 8
    )
    return max(1, min(MANY, MOST_BYTES // max(1, size)))


def _is_map(field: Field) -> bool:
    return bool(field.message_type and field.message_type.GetOptions().map_entry)


def _mutate_map(rng: Random, field: Field, values: Any) -> None:
    key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
    for _ in range(MANY if rng.random() < 0.02 else 1):
        odd_key = odd_scalar(rng, key, "")
        if value.cpp_type == Field.CPPTYPE_MESSAGE:
            mutate_message(rng, values[odd_key])
        else:
            values[odd_key] = odd_scalar(rng, value, "")


def _mutate_repeated(rng: Random, field: Field, values: Any) -> None:
    is_message = field.cpp_type == Field.CPPTYPE_MESSAGE
    at = rng.randrange(len(values)) if len(values) else -1
    draw = rng.randrange(100)
    if at >= 0 and draw < 15:
        del values[at]
    elif at >= 0 and draw < 30:
        values.append(copy.deepcopy(values[at]))
    elif draw < 40:
        items = [copy.deepcopy(item) for item in values]
        rng.shuffle(items)
        del values[:]
        values.extend(items)
    elif at >= 0 and draw < 42:
        values.extend([copy.deepcopy(values[at])] * _times(values[at]))
    elif is_message:
        mutate_message(rng, values[at] if at >= 0 else values.add())
    elif at >= 0:
        values[at] = odd_scalar(rng, field, values[at])
    else:
        values.append(odd_scalar(rng, field, None))


def odd_scalar(rng: Random, field: Field, value: Any) -> Any:
    kind = field.cpp_type
    if kind in _LIMITS:
        lowest, highest = _LIMITS[kind]
        number = rng.choice((*INTEGERS, lowest, highest, rng.randrange(100)))
        return min(max(number, lowest), highest)
    if kind in (Field.CPPTYPE_DOUBLE, Field.CPPTYPE_FLOAT):
        return rng.choice(FLOATS)
    if kind == Field.CPPTYPE_BOOL:
        return not value
    if field.type == Field.TYPE_BYTES:
        return mutate_bytes(rng, value or b"abc")
    text = value or ""
    if text[:1] == "{" and rng.random() < 0.7:
        return json_case(rng, text.encode()).decode("utf-8", "replace")
    return rng.choice((*STRINGS, text[:-1], text + "x", text.upper()))
