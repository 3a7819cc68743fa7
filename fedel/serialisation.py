"""Our typed values as JSON and back: records, results, states, plans. One codec for files and database."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from fedel.errors import ConfigError

T = TypeVar("T")
MAX_DEPTH = 100
"""Lists and tables in each other; Python raises ``RecursionError`` somewhere above."""


def to_json(value: Any, *, pretty: bool = False) -> str:
    """JSON that every reader accepts: a number that is not finite becomes ``null``.

    >>> to_json({"loss": float("nan"), "window": (1, 4)})
    '{"loss":null,"window":[1,4]}'
    """
    encoded = msgspec.json.encode(value)
    return (msgspec.json.format(encoded, indent=2) if pretty else encoded).decode()


def from_json(kind: type[T], text: str | bytes, where: str) -> T:
    """The value of type ``kind`` that ``text`` holds; keys that the type does not have are ignored.

    ``where`` names the source in the error: a file and line, or a row of the database.
    """
    try:
        return msgspec.json.decode(_finite(text), type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not the JSON of a {kind.__name__}: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """What JSON of any origin holds; ``ValueError`` if it is not JSON or nested deeper than any of ours is.

    >>> parse_json("[" * 101 + "]" * 101)
    Traceback (most recent call last):
    ...
    ValueError: more than 100 lists and tables in each other
    """
    too_deep = f"more than {MAX_DEPTH} lists and tables in each other"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _items(outer) if isinstance(inner, dict | list)]
        if not level:
            return value
    raise ValueError(too_deep)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _finite(text: str | bytes) -> str:
    """``null`` for ``NaN`` and ``Infinity``, which older versions wrote although they are not JSON."""
    text = text.decode() if isinstance(text, bytes) else text
    if "NaN" not in text and "Infinity" not in text:
        return text
    try:
        return json.dumps(json.loads(text, parse_constant=lambda _: None))
    except ValueError:
        return text
