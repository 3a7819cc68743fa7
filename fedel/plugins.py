"""Your own models, data sets, methods and trainers, found without a change to FedEL.

Two ways to name one: ``package.module:attribute``, or a name that an installed package has registered as an
entry point in one of the groups ``fedel.models``, ``fedel.data`` and ``fedel.strategies``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedel.config import nearest
from fedel.errors import FedelError


def registered(group: str) -> dict[str, str]:
    """Names that installed packages have registered in an entry point group, and what they stand for."""
    return {point.name: point.value for point in entry_points(group=group)}


def find(
    name: str, group: str, what: str, error: type[FedelError], known: Iterable[str] = ()
) -> Callable[..., Any]:
    """What the user calls ``name``, by its path or by entry point; ``known`` are FedEL's own, for the hint."""
    if ":" in name:
        return load(name, what, error)
    theirs = registered(group)
    if name not in theirs:
        hint = nearest(name, [*known, *theirs])
        raise error(f"{what} '{name}' is unknown (your own is written package.module:attribute); {hint}")
    return load(theirs[name], what, error)


def load(path: str, what: str, error: type[FedelError]) -> Callable[..., Any]:
    """The function or class that ``package.module:attribute`` names; ``what`` says in messages what it is."""
    module_name, colon, attribute = path.partition(":")
    if not (module_name and colon and attribute):
        raise error(f"{what} '{path}': write it as package.module:attribute")
    module = _module(module_name, f"{what} '{path}'", error)
    place = f"{what} '{path}': module '{module_name}' ({getattr(module, '__file__', 'built in')})"
    if attribute not in vars(module):
        offered = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise error(f"{place} has no '{attribute}'; {nearest(attribute, offered)}")
    found = vars(module)[attribute]
    if not callable(found):
        raise error(f"{place}: '{attribute}' is a {type(found).__name__}; name a function or a class")
    return found  # type: ignore[no-any-return]


def _module(name: str, place: str, error: type[FedelError]) -> Any:
    # Last, never first: a folder of the user's that is called like a package must not take its place.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        return import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not (name == problem.name or name.startswith(f"{problem.name}.")):
            raise error(
                f"{place}: module '{name}' needs '{problem.name}', which is not installed; install it"
            ) from problem
        raise error(
            f"{place}: there is no module '{name}', neither in {here} nor among the installed packages; start "
            "fedel in the directory that holds it, put that directory on PYTHONPATH, or install the package"
        ) from problem
    except Exception as problem:
        # Whatever the user's code raises while it is imported.
        kind = type(problem).__name__
        raise error(f"{place}: importing '{name}' failed: {kind}: {problem}; correct the module") from problem
