"""The code that travels with a job: which files, whether they are complete, and the operator's signature."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedel.api.jobs import JobTable
from fedel.bundle import Bundle, pack
from fedel.desk import user_code
from fedel.desk.submit import CodeToSend
from fedel.errors import CertificateError, ConfigError
from fedel.job import RunConfig
from fedel.security import signed_code
from fedel.security.folder import load
from fedel.security.tls import Tls
from fedel.wire.code import stored


def packed(made: JobTable, named: Sequence[str | Path]) -> Bundle | None:
    """The files that the job lists in ``[code]`` and those that were named; ``None`` if there are none."""
    folders = [Path(folder) for folder in user_code.folders(made.file)]
    base = made.file.absolute().parent if made.file else Path.cwd()
    paths = [base / file for file in made.code.files]
    paths += [_path(str(name), folders) for name in named]
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"{made.where}: [code] files: there is no {path}; paths begin at the job's folder"
            )
    if not paths:
        return None
    found = pack(paths)
    _check_complete(found, folders)
    return found


def signed(bundle: Bundle, job: RunConfig, tls: Tls) -> CodeToSend:
    if not tls.secure:
        raise CertificateError(
            "the job's code is signed with the operator's certificate, and there is none here: name its folder"
            " with --certs (docs/security.md), or copy the code to the machines and allow it in [code] there"
        )
    code = stored(bundle.text, signed_code.sign(load(tls.folder), bundle.text))
    modules = [name.partition(":")[0] for name in _methods(job.strategy) if ":" in name]
    return CodeToSend(code, any(module.partition(".")[0] in bundle.tops for module in modules))


def _path(name: str, folders: Sequence[Path]) -> Path:
    """A path, or the place of a module by its name."""
    inside = Path(*name.split("."))
    places = [
        Path(name),
        *(folder / path for folder in folders for path in (inside, inside.with_suffix(".py"))),
    ]
    for place in places:
        if place.exists():
            return place
    raise ConfigError(f"--code {name}: there is no such file, folder or module here")


def _check_complete(bundle: Bundle, folders: Sequence[Path]) -> None:
    """At this desk a module that was forgotten would be found; on a device it would not."""
    for path, source in bundle.files.items():
        for top in sorted(set(_imported(path, source)) - bundle.tops):
            if not top.startswith("fedel") and (place := _own(top, folders)):
                raise ConfigError(
                    f"{path} of the job's code imports '{top}', which is in {place} and not in the code: add it"
                    " to --code, or to [code] files in the job"
                )


def _imported(path: str, source: str) -> Iterator[str]:
    """Names of the modules at the top that a file imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} of the job's code is not Python: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]


def _own(top: str, folders: Sequence[Path]) -> str:
    """Where a module lies, if it is the user's own; what is installed goes before it."""
    files = [folder / path for folder in folders for path in (f"{top}.py", f"{top}/__init__.py")]
    place = next((file for file in files if file.exists()), None)
    if place is None or top in sys.stdlib_module_names:
        return ""
    try:
        spec = find_spec(top)
    except (ImportError, ValueError):
        spec = None
    found = Path(spec.origin).parts if spec and spec.has_location and spec.origin else ()
    return "" if {"site-packages", "dist-packages"}.intersection(found) else str(place)


def _methods(strategy: Mapping[str, Any]) -> Iterator[str]:
    yield str(strategy.get("name", ""))
    if isinstance(base := strategy.get("base"), Mapping):
        yield from _methods(base)
