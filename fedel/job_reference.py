"""Writes docs/job.md and the JSON schemas of job files from the code: ``python -m fedel.job_reference``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedel import config
from fedel.cli.local import LocalFleet
from fedel.job import CodeFiles, RunConfig
from fedel.simulation.job import SimulationConfig
from fedel.strategies import METHODS
from fedel.types import Strategy

DOCS = Path(__file__).parents[1] / "docs"
STRATEGY = "#/definitions/strategy"
_TYPES = {float: "number", int: "integer", str: "string", bool: "boolean"}
_SAID = {float: "number", int: "whole number", str: "text", bool: "true or false"}
_ASKED = "?"
"""A word that no setting takes."""

INTRO = """\
# The job file

<!-- Written by `make job-reference` from the code. Change the docstrings there, not this page. -->

A job is a TOML file. `fedel run` takes it to processes on this machine or to a federation, `fedel simulate`
to a virtual clock. Every key has a default, so a job says only what it wants to be different. `--set
section.key=value` overrides a key for one run. A key that does not exist, or a value of the wrong type,
ends the command with the name of the key before any training.

[configs/simulation.toml](../configs/simulation.toml) and [examples/own.toml](../examples/own.toml) are jobs
to start from.

## Help in your editor

[job.schema.json](job.schema.json) describes a job of `fedel run`, and
[simulation.schema.json](simulation.schema.json) one of `fedel simulate`. An editor that knows JSON schemas
for TOML (Taplo; in VS Code the extension *Even Better TOML*) then completes keys, shows what they mean and
marks wrong ones. Name the file in the first line of the job, by its path from there or by its address:

```toml
#:schema ../docs/job.schema.json
```

The schema knows the methods of FedEL and `package.module:Class`. It marks the short name of a method that an
installed package has registered, although `fedel` takes it. It does not know the limits of numbers: `fedel`
says those when it reads the job.
"""
STRATEGIES = """\
Without this section the method is `fedel`. `name` is one of the methods below, `package.module:Class` for
your own ([own-method.md](own-method.md)), or a name that an installed package has registered. The other
keys of `[strategy]` are the options of that method. A method that wraps another one has it in
`[strategy.base]`, with a `name` and options of its own.

The default `backward` of `budget_scope` is that of a simulation, and of a federation with `budget.pace =
"plan"`. With `budget.pace = "clock"`, as devices have it, a method that can do so counts the whole `round`,
and another one `train`, unless the job says what counts.
"""


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
            "" if isinstance(self.default, Mapping) or self.hint is Strategy else f"`{_text(self.default)}`"
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

    >>> words(RunConfig, "trainer"), words(LocalFleet, "slowdowns")
    ((), ())
    >>> from fedel.job import Budget
    >>> words(Budget, "pace")
    ('', 'plan', 'clock')
    """
    if typing.get_type_hints(kind)[name] is not str:
        return ()
    refusal = _refusal(kind, name, _ASKED)
    _, found, listed = refusal.partition(" is not one of: ")
    if not found:
        return ()
    empty = () if _refusal(kind, name, "") else ("",)
    return tuple(dict.fromkeys((*empty, *listed.split(", "))))


def pages() -> dict[str, str]:
    """File in docs/ -> what is written there."""
    return {
        "job.md": _page(),
        "job.schema.json": _schema_file("A job of `fedel run`", federation_keys()),
        "simulation.schema.json": _schema_file("A job of `fedel simulate`", simulation_keys()),
    }


def federation_keys() -> list[Key]:
    fleet = Key("fleet", LocalFleet, {}, _meaning(LocalFleet), ())
    code = Key("code", CodeFiles, {}, _meaning(CodeFiles), ())
    return [*keys(RunConfig), fleet, code]


def simulation_keys() -> list[Key]:
    return [*keys(RunConfig), *(key for key in keys(SimulationConfig) if key.name != "run")]


def _page() -> str:
    run, alone = keys(RunConfig), simulation_keys()[len(keys(RunConfig)) :]
    parts = [INTRO, "## For both commands", _table(run), *_sections(run)]
    parts += ["## Only for `fedel run` on this machine", *_section("fleet", LocalFleet)]
    parts += ["## Only for `fedel run --coordinator`", *_section("code", CodeFiles)]
    parts += ["## Only for `fedel simulate`", _table(alone), *_sections(alone)]
    parts += ["## Methods: `[strategy]`", STRATEGIES]
    for name, method in METHODS.items():
        about = (sys.modules[method.__module__].__doc__ or "").partition("\n")[0]
        parts += [f"### `{name}`", re.sub(r" \(algorithms \d+\)", "", about), _table(keys(method))]
    text = "\n\n".join(part.strip("\n") for part in parts) + "\n"
    return re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", text)


def _sections(listed: Iterable[Key], before: str = "") -> list[str]:
    """A heading and a table for every key that is a table itself."""
    parts: list[str] = []
    for key in listed:
        if kind := table_of(key.hint):
            many = "" if kind is key.hint else ".NAME"
            parts += _section(f"{before}{key.name}{many}", kind)
    return parts


def table_of(hint: Any) -> type[Any] | None:
    """The dataclass that a key is parsed into, or every table below it; ``None`` for a plain value."""
    return next(
        (typing.cast("type[Any]", h) for h in (hint, _values(hint)) if dataclasses.is_dataclass(h)), None
    )


def _section(place: str, kind: type[Any]) -> list[str]:
    return [f"### `[{place}]`", _meaning(kind), _table(keys(kind)), *_sections(keys(kind), f"{place}.")]


def _table(listed: Iterable[Key]) -> str:
    rows = [key.row() for key in listed if not dataclasses.is_dataclass(key.hint)]
    return "\n".join(("| key | takes | default | meaning |", "|---|---|---|---|", *rows))


def _schema_file(title: str, listed: Iterable[Key]) -> str:
    chosen = [
        {
            "if": {"properties": {"name": {"const": name}}},
            "then": {"$ref": f"#/definitions/{name}"},
        }
        for name in METHODS
    ]
    named = {
        "description": "The method: one of FedEL's, or package.module:Class for your own.",
        "anyOf": [{"enum": list(METHODS)}, {"type": "string", "pattern": "^[^:]+:[^:]+$"}],
    }
    strategy = {"type": "object", "required": ["name"], "properties": {"name": named}, "allOf": chosen}
    methods = {name: _object([*keys(method)], {"name": {"const": name}}) for name, method in METHODS.items()}
    schema: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        **_object(listed),
        "definitions": {"strategy": strategy, **methods},
    }
    schema["properties"]["strategy"] = {"$ref": STRATEGY}
    return json.dumps(schema, indent=1) + "\n"


def _object(listed: Iterable[Key], more: Mapping[str, Any] | None = None) -> dict[str, Any]:
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
        return _object(keys(typing.cast("type[Any]", hint)))
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    inner = _schema(_values(hint))
    if typing.get_origin(hint) is tuple:
        return {"type": "array", "items": inner}
    return {"type": "object", "additionalProperties": inner}


def _said(hint: Any) -> str:
    """The type in words."""
    if len(several := _alternatives(hint)) > 1:
        return ", or ".join(map(_said, several))
    (hint,) = several
    if hint in _SAID:
        return _SAID[hint]
    if typing.get_origin(hint) is tuple:
        return f"list: {_said(_values(hint))}"
    inner = _values(hint)
    return f"table: name = {_said(inner)}" if inner in _SAID else "table"


def _values(hint: Any) -> Any:
    """The type of what a list or table holds; ``None`` for anything else."""
    arguments = typing.get_args(hint)
    return arguments[0 if typing.get_origin(hint) is tuple else -1] if arguments else None


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


def _meaning(kind: type[Any]) -> str:
    return _plain(inspect.cleandoc(kind.__doc__ or ""))


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
                found[field.target.id] = _plain(str(text.value.value))
    return found


def _plain(text: str) -> str:
    return " ".join(text.replace("``", "`").split())


def main() -> int:
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
