"""Read TOML tables into frozen dataclasses. Errors name the file, the key and the nearest valid key."""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedel.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

T = TypeVar("T")
MAX_BITS = 64
"""Of an integer: TOML promises no more."""
MAX_BYTES = 4_000_000
"""Of a file: reading one of 27 MB takes seconds and hundreds of megabytes."""
MAX_LISTED = 20
"""Words that a hint lists; a model has hundreds of tensors."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word: the closest known word, or the known words.

    >>> nearest("momentun", ["lr", "momentum"])
    "did you mean 'momentum'?"
    """
    known = sorted(known)
    by_lower = {name.lower(): name for name in known}
    if close := difflib.get_close_matches(word.lower(), by_lower, n=1):
        return f"did you mean '{by_lower[close[0]]}'?"
    more = f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
    return f"valid are: {', '.join(known[:MAX_LISTED]) or 'none'}{more}"


def read(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The tables of a TOML file after ``section.key=value`` overrides (values as in TOML)."""
    path = Path(path)
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ConfigError(
                f"{path}: {size / 1e6:.0f} MB are too much for a configuration; at most {MAX_BYTES / 1e6:.0f}"
                " MB are read: is it the right file?"
            )
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file; see configs/ for examples") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    for override in overrides:
        override_key(table, override)
    return table


def override_key(table: dict[str, Any], override: str) -> None:
    """Apply one ``section.key=value`` in place; a value that is not valid TOML is taken as a string.

    >>> table = {"work": {"lr": 0.1}}
    >>> override_key(table, "work.lr=0.01"); override_key(table, "model.name=vgg16"); table
    {'work': {'lr': 0.01}, 'model': {'name': 'vgg16'}}
    """
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {override}: write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    put(table, path.strip(), value, f"--set {override}")


def put(table: dict[str, Any], path: str, value: Any, where: str) -> None:
    """Set ``section.key`` in place; sections that are missing are made.

    >>> table = {"work": {"lr": 0.1}}; put(table, "work.lr", 0.2, "here"); table
    {'work': {'lr': 0.2}}
    """
    *sections, key = path.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: '{section}' is a value, not a section")
    table[key] = value


def write(table: Mapping[str, Any]) -> str:
    """A table as TOML text that ``read`` can read back unchanged; keys without a value are left out.

    >>> print(write({"seed": 1, "work": {"lr": 0.1, "name": "sgd"}, "sizes": (1, 2)}), end="")
    seed = 1
    sizes = [1, 2]
    <BLANKLINE>
    [work]
    lr = 0.1
    name = "sgd"
    """
    lines: list[str] = []
    _write(table, (), lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(table: Mapping[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and v is not None}
    if path and (plain or not table):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            _write(value, (*path, key), lines)


def _key(key: str) -> str:
    return key if key and all(c.isalnum() or c in "-_" for c in key) and key.isascii() else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (int, float)):
        return repr(value)
    return _string(str(value))


def _string(text: str) -> str:
    # JSON and TOML use the same escapes, except for characters beyond 16 bits and for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def leaves(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every value of a table under its whole name; keys without a value are left out.

    >>> leaves({"seed": 1, "work": {"lr": 0.1, "name": None}})
    [('seed', 1), ('work.lr', 0.1)]
    """
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            found += leaves(value, f"{prefix}{key}.")
        elif value is not None:
            found.append((prefix + key, value))
    return found


def parse(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """An instance of the frozen dataclass ``cls`` from a TOML table; ``where`` names it in errors.

    A field with ``metadata={"words": ...}`` takes only these words.

    >>> from fedel.types import LocalWork
    >>> parse(LocalWork, {"lr": 1}, "job.toml [work]").lr
    1.0
    >>> parse(LocalWork, {"momentun": 1}, "job.toml [work]")
    Traceback (most recent call last):
    ...
    fedel.errors.ConfigError: job.toml [work]: unknown key 'momentun'; did you mean 'momentum'?
    """
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table of keys, not {_shown(table)}")
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    values = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'; {nearest(key, known)}")
        values[key] = _convert(hints[key], value, f"{where}: {key}")
        words = known[key].metadata.get("words", ())
        if words and values[key] not in words:
            raise ConfigError(f"{where}: {key} = {value!r} is not one of: {', '.join(words)}")
    for key, field in known.items():
        if key not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: key '{key}' is missing and has no default")
    try:
        return cls(**values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from None


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes no number of thousands of digits
        return "a number that is too long to show"


def _float(value: int, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ConfigError(f"{where}: a number of {value.bit_length()} bits is too large") from None


def _convert_to_one(hints: list[Any], value: Any, where: str) -> Any:
    """The first of these types that the value fits; else the error of the last one."""
    for hint in hints[:-1]:
        try:
            return _convert(hint, value, where)
        except ConfigError:
            continue
    return _convert(hints[-1], value, where)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _convert_to_one([a for a in arguments if a is not type(None)], value, where)
    if dataclasses.is_dataclass(hint):
        return parse(hint, value, where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {str(k): _convert(arguments[1], v, f"{where}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _float(value, where)
    if hint is int and type(value) is int and value.bit_length() > MAX_BITS:
        raise ConfigError(f"{where}: a number of {value.bit_length()} bits is too large")
    if hint is Any or (isinstance(hint, type) and type(value) is hint):
        return value
    if isinstance(hint, type) and issubclass(hint, Path) and isinstance(value, str):
        return Path(value)
    raise ConfigError(
        f"{where} = {_shown(value)}: expected {getattr(hint, '__name__', hint)}, not {type(value).__name__}"
    )
