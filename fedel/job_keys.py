"""The keys of a table in a job: what each takes, its default and its meaning, as text and as a JSON schema."""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import inspect
import itertools
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel import config
from fedel.types import Strategy

STRATEGY = "#/definitions/strategy"
_TYPES = {float: "number", int: "integer", str: "string", bool: "boolean"}
_SAID = {float: "number", int: "whole number", str: "text", Path: "text", bool: "true or false"}
_ASKED = "?"
"""A word that no setting takes."""


@dataclass(frozen=True)
class Key:
    """One setting of a table."""

    name: str
    hint: Any
    default: Any
    meaning: str
    words: tuple[str, ...]
    """The words that it takes; empty if it takes more than a few."""

    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"description": self.meaning, **_schema(self.hint)}
        if self.words:
            found["enum"] = list(self.words)
        if not dataclasses.is_dataclass(self.hint) and self.hint is not Strategy:
            found["default"] = self.default
        return found

    def row(self) -> str:
        said = ", ".join(f"`{_text(word)}`" for word in self.words) or _said(self.hint)
        default = (
            ""
            if self.default is None or isinstance(self.default, Mapping) or self.hint is Strategy
            else f"`{_text(self.default)}`"
        )
        cells = (f"`{self.name}`", said, default, self.meaning)
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def keys(kind: type[Any]) -> list[Key]:
    """The settings that a dataclass is parsed from."""
    hints, meanings = typing.get_type_hints(kind), _meanings(kind)
    return [
        Key(
            field.name,
            hints[field.name],
            _default(field),
            meanings.get(field.name, ""),
            words(kind, field.name),
        )
        for field in dataclasses.fields(kind)
        if field.init
    ]


def words(kind: type[Any], name: str) -> tuple[str, ...]:
    """The words that a setting takes, as its own check lists them.

    >>> from fedel.job import Budget, RunConfig
    >>> words(RunConfig, "trainer")
    ()
    >>> words(Budget, "pace")
    ('', 'plan', 'clock')
    """
    if typing.get_type_hints(kind)[name] is not str:
        return ()
    (field,) = (each for each in dataclasses.fields(kind) if each.name == name)
    if "words" in field.metadata:
        return tuple(field.metadata["words"])
    refusal = _refusal(kind, name, _ASKED)
    _, found, listed = refusal.partition(" is not one of: ")
    if not found:
        return ()
    empty = () if _refusal(kind, name, "") else ("",)
    return tuple(dict.fromkeys((*empty, *listed.split(", "))))


def table_of(hint: Any) -> type[Any] | None:
    """The dataclass that a key is parsed into, or every table below it; ``None`` for a plain value."""
    return next(
        (typing.cast("type[Any]", h) for h in (hint, _values(hint)) if dataclasses.is_dataclass(h)), None
    )


def table(listed: Iterable[Key]) -> str:
    rows = [key.row() for key in listed if not dataclasses.is_dataclass(key.hint)]
    return "\n".join(("| key | takes | default | meaning |", "|---|---|---|---|", *rows))


def as_object(listed: Iterable[Key], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    properties = {**(more or {}), **{key.name: key.schema() for key in listed}}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _schema(hint: Any) -> dict[str, Any]:
    """What ``config.parse`` takes for this type."""
    if len(several := _alternatives(hint)) > 1:
        return {"anyOf": [_schema(each) for each in several]}
    (hint,) = several
    if hint is Strategy:
        return {"$ref": STRATEGY}
    if hint is Any:
        return {}
    if dataclasses.is_dataclass(hint):
        return as_object(keys(typing.cast("type[Any]", hint)))
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    inner = _schema(_values(hint))
    if _is_list(hint):
        return {"type": "array", "items": inner}
    return {"type": "object", "additionalProperties": inner}


def _said(hint: Any) -> str:
    """The type in words."""
    if len(several := _alternatives(hint)) > 1:
        return ", or ".join(map(_said, several))
    (hint,) = several
    if hint in _SAID:
        return _SAID[hint]
    if _is_list(hint):
        return f"list: {_said(_values(hint))}"
    inner = _values(hint)
    return f"table: name = {_said(inner)}" if inner in _SAID else "table"


def _is_list(hint: Any) -> bool:
    return typing.get_origin(hint) in (tuple, collections.abc.Sequence)


def _values(hint: Any) -> Any:
    """The type of what a list or table holds; ``None`` for anything else."""
    arguments = typing.get_args(hint)
    return arguments[0 if _is_list(hint) else -1] if arguments else None


def _alternatives(hint: Any) -> list[Any]:
    """The types of a union, without None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for each in typing.get_args(hint) if each is not type(None)]
    return [hint]


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return None if made is dataclasses.MISSING else made


def _text(value: Any) -> str:
    return config.write({"key": value}).removeprefix("key = ").strip()


def _refusal(kind: type[Any], name: str, value: str) -> str:
    try:
        kind(**{name: value})
    except ValueError as error:
        return str(error)
    return ""


def meaning(kind: type[Any]) -> str:
    return plain(inspect.cleandoc(kind.__doc__ or ""))


def _meanings(kind: type[Any]) -> dict[str, str]:
    """The docstring under each field, of the class or of the one that it inherits the field from."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(each):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        body = typing.cast(ast.ClassDef, tree).body
        for field, text in itertools.pairwise(body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = plain(str(text.value.value))
    return found


def plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())
