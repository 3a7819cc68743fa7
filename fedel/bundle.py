"""The code of a job as one text: its author's Python files, as they travel to devices and servers.

A JSON table from path to source, in one fixed form, so that the same files always have the same SHA-256.
Nothing in it could be a link, a mode or something packed, and anyone can read it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedel.errors import ConfigError
from fedel.serialisation import parse_json

MAX_BYTES = 8_000_000
MAX_FILES = 1000
MAX_FOLDERS = 8
"""Folders in each other."""
MAX_PATH = 200
SUFFIX = ".py"
_LEFT_OUT = ("__pycache__", "site-packages", "dist-packages", "node_modules")
"""Folders that hold nobody's own source."""


@dataclass(frozen=True)
class Bundle:
    """Python files by their path, such as ``own.py`` and ``nets/__init__.py``."""

    files: Mapping[str, str]

    def __post_init__(self) -> None:
        if not 1 <= len(self.files) <= MAX_FILES:
            number = len(self.files)
            raise ConfigError(f"the job's code has {number} files, which is not between 1 and {MAX_FILES}")
        for path in self.files:
            if wrong := objection_to_path(path):
                raise ConfigError(f"the job's code: {wrong}")
        if len(self.text) > MAX_BYTES:
            raise ConfigError(
                f"the job's code has {len(self.text) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:g}: name only"
                " the files that the job needs, and leave data out"
            )

    @cached_property
    def text(self) -> bytes:
        """What is signed, stored and sent."""
        return _text(self.files)

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    @cached_property
    def tops(self) -> frozenset[str]:
        """Names of the modules and packages at the top.

        >>> sorted(Bundle({"own.py": "", "nets/small.py": ""}).tops)
        ['nets', 'own']
        """
        return frozenset(_top(path) for path in self.files)


def objection_to_path(path: str) -> str:
    """What is wrong with the name of a file; empty if it is one that a module can have.

    >>> objection_to_path("nets/small.py"), objection_to_path("../etc/passwd")
    ('', "'../etc/passwd' is not a Python file with a plain path such as nets/small.py")
    >>> objection_to_path("queue.py")
    "'queue.py' is called like a module of Python or of FedEL: rename it, or name the job's files one by one"
    """
    folders = path.removesuffix(SUFFIX).split("/")
    plain = path.endswith(SUFFIX) and path.isascii() and all(part.isidentifier() for part in folders)
    if not plain or len(path) > MAX_PATH or len(folders) > MAX_FOLDERS:
        return f"{path[:MAX_PATH]!r} is not a Python file with a plain path such as nets/small.py"
    top = folders[0]
    if top in sys.stdlib_module_names or top == "fedel" or top.startswith("fedel_"):
        other = "rename it, or name the job's files one by one"
        return f"{path!r} is called like a module of Python or of FedEL: {other}"
    return ""


def read(text: bytes) -> Bundle:
    """The bundle that came from somewhere; ``ConfigError`` if it is none, or not in its one form."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"the job's code has {len(text) / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:g}")
    try:
        table = parse_json(text)
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"the job's code cannot be read: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(source, str) for source in table.values()):
        raise ConfigError("the job's code is not a table of Python files")
    try:
        found = Bundle(table)
        same = found.text == text
    except UnicodeEncodeError as error:
        raise ConfigError(f"the job's code is not text: {error}") from None
    if not same:
        raise ConfigError("the job's code is not in its one form: it was not made by `fedel run --code`")
    return found


def pack(paths: Iterable[Path]) -> Bundle:
    """The files of these paths: a file, a package, or a folder with modules and packages.

    A folder with ``__init__.py`` is a package and keeps its name; of another folder, the content is taken.
    """
    files: dict[str, str] = {}
    for path in paths:
        root = path.parent if path.is_file() or (path / "__init__.py").exists() else path
        found = [path] if path.is_file() else sorted(path.rglob(f"*{SUFFIX}"))
        chosen = [file for file in found if _is_wanted(file.relative_to(root))]
        if not chosen:
            raise ConfigError(f"{path}: there is no Python file; name a .py file, or a folder with some")
        for file in chosen:
            name = file.relative_to(root).as_posix()
            source = _source(file)
            if files.setdefault(name, source) != source:
                raise ConfigError(f"{file}: the job's code has another {name} already; rename one of them")
            if len(files) > MAX_FILES:
                raise ConfigError(f"{path}: more than {MAX_FILES} Python files; name those that the job needs")
    return Bundle(files)


def _is_wanted(path: Path) -> bool:
    return not any(part in _LEFT_OUT or part.startswith(".") for part in path.parts)


def _source(file: Path) -> str:
    if file.is_symlink():
        raise ConfigError(f"{file} is a link: name the file that it leads to")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as Python source in UTF-8: {error}") from None


def _text(files: Mapping[str, str]) -> bytes:
    return json.dumps(dict(files), sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()


def _top(path: str) -> str:
    return path.removesuffix(SUFFIX).partition("/")[0]
