"""Code that came with a job, imported for that job alone.

Its modules get a private package as a prefix, one for each run, so that they replace nobody else's: not
Python's, not FedEL's, not the installed ones, and not those of another run with another version of them. An
``import`` inside the code finds the code's own modules first, by the names that its author knows.
"""

from __future__ import annotations

import builtins
import hashlib
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from fedel.bundle import SUFFIX, Bundle

PREFIX = "fedel_job_"


class JobCode:
    """A bundle that can be imported, until ``close``."""

    def __init__(self, bundle: Bundle, signer: str, scope: str) -> None:
        """``signer`` is who vouches for it, ``operator:ada``; ``scope`` tells the runs of a process apart."""
        self.bundle, self.signer = bundle, signer
        name = hashlib.sha256(f"{scope}\n{bundle.sha256}".encode()).hexdigest()[:32]
        self.package = f"{PREFIX}{name}"
        self.builtins: Mapping[str, Any] = {**vars(builtins), "__import__": self._import}
        _LIVE[self.package] = self
        if _FINDER not in sys.meta_path:
            sys.meta_path.append(_FINDER)

    def holds(self, module: str) -> bool:
        return module.partition(".")[0] in self.bundle.tops

    def module(self, name: str) -> ModuleType:
        return import_module(f"{self.package}.{name}")

    def shown(self, name: str | None) -> str | None:
        """The name of a module as its author knows it."""
        return name.removeprefix(f"{self.package}.") if name else name

    def close(self) -> None:
        """Forget its modules; what is in use goes on."""
        if _LIVE.get(self.package) is self:
            del _LIVE[self.package]
            for name in [n for n in sys.modules if n == self.package or n.startswith(f"{self.package}.")]:
                del sys.modules[name]

    def path_of(self, module: str) -> tuple[str, bool] | None:
        """The file of a module and whether it is a package; a folder alone is a package without a file."""
        path, files = module.replace(".", "/"), self.bundle.files
        if not module or f"{path}/__init__{SUFFIX}" in files:
            return f"{path}/__init__{SUFFIX}", True
        if f"{path}{SUFFIX}" in files:
            return f"{path}{SUFFIX}", False
        return (f"{path}/", True) if any(name.startswith(f"{path}/") for name in files) else None

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        """What ``import`` calls in the code's own modules."""
        if level or not self.holds(name):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        inner = f"{self.package}.{name}"
        if fromlist:
            return builtins.__import__(inner, globals, locals, fromlist, 0)
        import_module(inner)
        return sys.modules[f"{self.package}.{name.partition('.')[0]}"]


class _Loader(InspectLoader):
    def __init__(self, code: JobCode, path: str, is_package: bool) -> None:
        self._code, self._path, self._is_package = code, path, is_package
        self.shown = f"job-code-{code.bundle.sha256[:12]}/{path}"

    def get_source(self, fullname: str) -> str:  # noqa: ARG002
        return self._code.bundle.files.get(self._path, "")

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_source(fullname), self.shown)

    def is_package(self, fullname: str) -> bool:  # noqa: ARG002
        return self._is_package

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(__builtins__=self._code.builtins, __file__=self.shown)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds modules of code that came with jobs, and no others."""

    def find_spec(
        self,
        fullname: str,
        path: object = None,  # noqa: ARG002
        target: object = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        code = _LIVE.get(package)
        found = code.path_of(module) if code else None
        if code is None or found is None:
            return None
        loader = _Loader(code, *found)
        return ModuleSpec(fullname, loader, origin=loader.shown, is_package=found[1])


_LIVE: dict[str, JobCode] = {}
_FINDER = _Finder()
