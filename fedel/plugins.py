"""Your own models, data sets, methods and trainers, found without a change to FedEL.

Two ways to name one: ``package.module:attribute``, or a name that an installed package has registered as an
entry point in one of the groups ``fedel.models``, ``fedel.data`` and ``fedel.strategies``.

In Python, objects can be given instead (``given``): a job names such an object ``object:NAME``, and only the
process that gave it, and processes forked from that one, can run the job.

A job can come from somebody else than the owner of the machine. So a device or server says which code a job may
name (``Allowed``), and inside ``only(allowed)`` nothing else is imported, however it is named. Code that came
with the job (``fedel.job_code``) goes before code that is here, if the machine takes code from its signer.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedel.config import nearest
from fedel.errors import FedelError
from fedel.job_code import JobCode

_log = logging.getLogger(__name__)

OWN = ("fedel.strategies", "fedel.training.factory:make_trainer")
"""FedEL's own that a job may name by its path. Its models and data sets have short names, which need none; the
rest of FedEL can write files and open connections, and is not for jobs."""
GIVEN = "object:"
"""Begins the name of an object that was given in Python."""
SIGNER = "operator:"
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Allowed:
    """The ``[code]`` section of a device or server: the code that a job may name, beside FedEL's own."""

    allow: tuple[str, ...] = ()
    """``package`` or ``package.module``, with everything below it; or one ``package.module:function``."""
    folders: tuple[str, ...] = ()
    """Every module that lies in one of these folders, except packages that are installed there."""
    files: tuple[str, ...] = ()
    """Files and folders that a job may name in its options, beside those below the working directory."""
    bundles: bool | tuple[str, ...] = False
    """Whose code may come with a job and run here (docs/job-code.md): ``["operator:ada"]``; ``true``: that of
    any operator of this federation; ``false``: nobody's."""

    def __post_init__(self) -> None:
        for name in self.allow:
            module, colon, attribute = name.removesuffix(".").partition(":")
            if not _is_module_name(module) or bool(colon) != attribute.isidentifier():
                raise ValueError(f"allow = {name!r}: write package, package.module or package.module:function")
            if module.partition(".")[0] in sys.stdlib_module_names:
                raise ValueError(f"allow = {name!r}: Python's own modules are never allowed; name your own")
        for signer in self.bundles if isinstance(self.bundles, tuple) else ():
            if not signer.removeprefix(SIGNER) or not signer.startswith(SIGNER):
                raise ValueError(f"bundles = {signer!r}: write it as operator:NAME, or bundles = true for all")

    def takes_from(self, signer: str) -> bool:
        """Whether code that came with a job and is signed by this one may run.

        >>> [Allowed(bundles=whose).takes_from("operator:eve") for whose in (("operator:ada",), True)]
        [False, True]
        """
        return self.bundles if isinstance(self.bundles, bool) else signer in self.bundles

    def by_name(self, module: str, attribute: str) -> bool:
        """Whether it is listed, by itself or by what it belongs to.

        >>> mine = Allowed(("mine", "other.nets:small"))
        >>> [mine.by_name(module, "small") for module in ("mine", "mine.nets", "minecraft", "other.nets")]
        [True, True, False, True]
        >>> mine.by_name("other.nets", "large")
        False
        """
        listed = [name.removesuffix(".") for name in (*OWN, *self.allow)]
        if f"{module}:{attribute}" in listed:
            return True
        return any(module == name or module.startswith(f"{name}.") for name in listed)

    def by_folder(self, module: str) -> bool:
        """Whether this module lies in an allowed folder; imports nothing."""
        if not self.folders or not _is_module_name(module):
            return False
        try:
            top = find_spec(module.partition(".")[0])
        except ValueError:  # a module that Python made itself, such as __main__
            return False
        if top is None:
            return False
        places = list(top.submodule_search_locations or ())
        if top.has_location and top.origin:  # what is built in or frozen has no file
            places.append(top.origin)
        return bool(places) and all(any(_lies_in(p, folder) for folder in self.folders) for p in places)

    def reads(self, path: Path) -> bool:
        """Whether a job may name this file or folder.

        >>> mine = Allowed(files=("/data/albert",))
        >>> [mine.reads(Path(path)) for path in ("albert", "../albert", "/etc/passwd", "/data/albert/a.bin")]
        [True, False, False, True]
        """
        if ".." in path.parts:
            return False
        return not path.is_absolute() or any(path.is_relative_to(Path(file).absolute()) for file in self.files)

    def covers(self, module: str, attribute: str) -> bool:
        """Whether this function or class, defined in this module, may run."""
        return self.by_name(module, attribute) or self.by_folder(module)


_ALLOWED: ContextVar[Allowed | None] = ContextVar("allowed", default=None)
"""``None`` where people run their own jobs: everything is allowed."""


_CODE: ContextVar[JobCode | None] = ContextVar("code", default=None)
"""What came with the job."""


@contextmanager
def only(allowed: Allowed | None, code: JobCode | None = None) -> Iterator[None]:
    """Inside, ``load`` and ``find`` refuse code that is not allowed before they import it; ``code`` came with
    the job. Without ``allowed`` everything is."""
    token, came = _ALLOWED.set(allowed), _CODE.set(code)
    try:
        yield
    finally:
        _ALLOWED.reset(token)
        _CODE.reset(came)


_GIVEN: ContextVar[Mapping[str, Callable[..., Any]]] = ContextVar("given", default={})  # noqa: B039


@contextmanager
def given(objects: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, ``find`` knows these objects by their names, which begin with ``object:``."""
    token = _GIVEN.set({**_GIVEN.get(), **objects})
    try:
        yield
    finally:
        _GIVEN.reset(token)


def registered(group: str) -> dict[str, str]:
    """Names that installed packages have registered in an entry point group, and what they stand for."""
    return {point.name: point.value for point in entry_points(group=group)}


def find(
    name: str, group: str, what: str, error: type[FedelError], known: Iterable[str] = ()
) -> Callable[..., Any]:
    """What the user calls ``name``, by its path or by entry point; ``known`` are FedEL's own, for the hint."""
    if name in _GIVEN.get():
        return _GIVEN.get()[name]
    if name.startswith(GIVEN):
        raise error(
            f"{what} '{name}' was given as a Python object, which no file holds; give it again in Python, or"
            " name it as package.module:attribute (docs/python.md)"
        )
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
    allowed, code = _ALLOWED.get(), _CODE.get()
    if code is not None and not code.holds(module_name):
        code = None
    if allowed is not None and code is not None and not allowed.takes_from(code.signer):
        raise error(f"{what} '{path}': {refusal_of_code(code.signer)}")
    _search_own_folders(allowed)
    if allowed is not None and code is None and not allowed.covers(module_name, attribute):
        raise error(_refusal(f"{what} '{path}'", module_name))
    module = _module(module_name, f"{what} '{path}'", error, code)
    place = f"{what} '{path}': module '{module_name}' ({getattr(module, '__file__', 'built in')})"
    if attribute not in vars(module):
        offered = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise error(f"{place} has no '{attribute}'; {nearest(attribute, offered)}")
    found = vars(module)[attribute]
    if not callable(found):
        raise error(f"{place}: '{attribute}' is a {type(found).__name__}; name a function or a class")
    home = str(getattr(found, "__module__", None))
    if allowed is not None and code is None and not allowed.covers(home, attribute):
        raise error(
            f"{_refusal(f'{what} {path!r}', home)}; '{attribute}' is defined there, not in {module_name}"
        )
    return found  # type: ignore[no-any-return]


def call(
    function: Callable[..., Any], options: Mapping[str, Any], what: str, section: str, error: type[FedelError]
) -> Any:
    """What the user's function returns; ``what`` names it in messages, ``section`` is where its options are."""
    missing = [
        name
        for name, p in inspect.signature(function).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in options
    ]
    if missing:
        raise error(f"{what} needs {', '.join(f'`{name}`' for name in missing)}: give it in [{section}]")
    try:
        return function(**options)
    except FedelError:
        raise
    except Exception as problem:
        # The traceback leads to the line in the user's code; the error alone travels to other machines.
        _log.exception("%s failed:", what)
        kind = type(problem).__name__
        raise error(f"{what} failed: {kind}: {problem}; correct the function") from problem


def has_module(name: str) -> bool:
    """Whether there is such a module outside of any package; imports nothing."""
    _search_own_folders(_ALLOWED.get())
    return find_spec(name) is not None


def path_of(option: str | Path, what: str, error: type[FedelError]) -> Path:
    """The file or folder that an option of a job names."""
    path, allowed = Path(option).expanduser(), _ALLOWED.get()
    if allowed is not None and not allowed.reads(path):
        raise error(
            f"{what} '{path}': jobs may name files below this machine's working directory only; if its owner"
            " wants them to read this one, add it to `files` in the section [code] of the configuration there"
        )
    return path


def refusal_of_code(signer: str) -> str:
    """For the owner of a machine that does not take code from this signer."""
    return (
        f"this machine runs no code that comes with a job of {signer}; if its owner trusts that operator with"
        f' everything that this process may do, put [code] bundles = ["{signer}"] into the configuration there'
        " (agent.toml on a device) and start it again"
    )


def _refusal(place: str, module: str) -> str:
    return (
        f"{place}: this machine does not allow jobs to run code of '{module}'; if its owner trusts that code, "
        "add the module to `allow` in the section [code] of the configuration there"
    )


def _search_own_folders(allowed: Allowed | None) -> None:
    # Last, never first: a folder of the user's that is called like a package must not take its place.
    for folder in (Path.cwd(), *(Path(folder).absolute() for folder in (allowed.folders if allowed else ()))):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def _module(name: str, place: str, error: type[FedelError], code: JobCode | None) -> Any:
    try:
        return import_module(name) if code is None else code.module(name)
    except ModuleNotFoundError as problem:
        missing = problem.name if code is None else code.shown(problem.name)
        if missing is None or not (name == missing or name.startswith(f"{missing}.")):
            also = "" if code is None else ", or send it along (--code)"
            raise error(
                f"{place}: module '{name}' needs '{missing}', which is not installed; install it{also}"
            ) from problem
        if code is not None:
            raise error(f"{place}: there is no '{name}' in the code that came with the job") from problem
        raise error(
            f"{place}: there is no module '{name}', neither in {Path.cwd()} nor among the installed packages; "
            "start fedel in the directory that holds it, put that on PYTHONPATH, or install the package"
        ) from problem
    except Exception as problem:
        # Whatever the user's code raises while it is imported.
        kind = type(problem).__name__
        raise error(f"{place}: importing '{name}' failed: {kind}: {problem}; correct the module") from problem


def _is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _lies_in(place: str, folder: str) -> bool:
    """As they are written, or with links followed: a link in the folder is the owner's, too."""
    for one, other in (
        (Path(place).absolute(), Path(folder).absolute()),
        (Path(place).resolve(), Path(folder).resolve()),
    ):
        if one.is_relative_to(other):
            return not _INSTALLED.intersection(one.relative_to(other).parts)
    return False
