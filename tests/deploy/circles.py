"""What each extra of the package installs, and a Python process that can import nothing else."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PROGRAM = """
import sys
blocked, words = sys.argv[1].split(","), sys.argv[2:]
sys.path[:] = [p for p in sys.path if p]
sys.modules.update(dict.fromkeys(blocked))
from fedel.cli.main import main
sys.exit(main(words))
"""


def direct(extra: str) -> dict[str, Requirement]:
    """What pyproject.toml requires with an extra, our own extras resolved."""
    found = [*PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] if extra else ())]
    by_name: dict[str, Requirement] = {}
    for requirement in map(Requirement, found):
        if requirement.name == "fedel":
            for inner in requirement.extras:
                by_name |= direct(inner)
        else:
            by_name[canonicalize_name(requirement.name)] = requirement
    return by_name


@cache
def installed(extra: str) -> frozenset[str]:
    """Names of all distributions that ``pip install 'fedel[extra]'`` brings, their dependencies included."""
    todo, found = list(direct(extra).values()), set[str]()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = requirement.extras or {""}
        if (requirement.marker and not requirement.marker.evaluate({"extra": ""})) or name in found:
            continue
        found.add(name)
        for inner in map(Requirement, metadata.requires(name) or ()):
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(Requirement(str(inner).partition(";")[0]))
    return frozenset(found)


@cache
def blocked(extra: str) -> str:
    """Import names of everything installed here that the extra does not bring, separated by commas."""
    allowed = installed(extra) | {"fedel"}
    return ",".join(
        name
        for name, owners in metadata.packages_distributions().items()
        if not allowed & {canonicalize_name(owner) for owner in owners} and "," not in name
    )


def command(extra: str, *words: str, without: str = "") -> list[str]:
    """``fedel WORDS`` as where only ``fedel[extra]`` is installed, and one package of it may be missing."""
    names = ",".join(filter(None, (blocked(extra), without)))
    return [sys.executable, "-c", PROGRAM, names, *words]


def fedel(extra: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(extra, *words, **options), capture_output=True, text=True, check=False, timeout=120
    )
