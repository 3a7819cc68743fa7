"""Writes docs/job.md and the JSON schemas of job files from the code: ``python -m fedel.job_reference``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedel import workload_reference
from fedel.desk.local import LocalFleet
from fedel.job import CodeFiles, RunConfig
from fedel.job_keys import STRATEGY, Key, as_object, keys, meaning, table, table_of
from fedel.simulation.job import SimulationConfig
from fedel.strategies import METHODS

DOCS = Path(__file__).parents[1] / "docs"

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


def pages() -> dict[str, str]:
    """File in docs/ -> what is written there."""
    return {
        "job.md": _page(),
        "job.schema.json": _schema_file("A job of `fedel run`", federation_keys()),
        "simulation.schema.json": _schema_file("A job of `fedel simulate`", simulation_keys()),
    }


def federation_keys() -> list[Key]:
    fleet = Key("fleet", LocalFleet, {}, meaning(LocalFleet), ())
    code = Key("code", CodeFiles, {}, meaning(CodeFiles), ())
    return [*keys(RunConfig), fleet, code]


def simulation_keys() -> list[Key]:
    return [*keys(RunConfig), *(key for key in keys(SimulationConfig) if key.name != "run")]


def _page() -> str:
    run, alone = keys(RunConfig), simulation_keys()[len(keys(RunConfig)) :]
    parts = [INTRO, "## For both commands", table(run), *_sections(run)]
    parts += ["## Only for `fedel run` on this machine", *_section("fleet", LocalFleet)]
    parts += ["## Only for `fedel run --coordinator`", *_section("code", CodeFiles)]
    parts += ["## Only for `fedel simulate`", table(alone), *_sections(alone)]
    parts += ["## Methods: `[strategy]`", STRATEGIES]
    for name, method in METHODS.items():
        about = (sys.modules[method.__module__].__doc__ or "").partition("\n")[0]
        parts += [f"### `{name}`", re.sub(r" \(algorithms \d+\)", "", about), table(keys(method))]
    parts += workload_reference.sections()
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


def _section(place: str, kind: type[Any]) -> list[str]:
    return [f"### `[{place}]`", meaning(kind), table(keys(kind)), *_sections(keys(kind), f"{place}.")]


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
    methods = {name: as_object([*keys(method)], {"name": {"const": name}}) for name, method in METHODS.items()}
    schema: dict[str, Any] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": title,
        **as_object(listed),
        "definitions": {"strategy": strategy, **methods},
    }
    schema["properties"]["strategy"] = {"$ref": STRATEGY}
    return json.dumps(schema, indent=1) + "\n"


def main() -> int:
    for name, text in pages().items():
        (DOCS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
