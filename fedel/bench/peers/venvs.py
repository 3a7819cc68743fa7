"""Virtual environments of other systems, one per version, in the user's cache; made once."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fedel.bench.section import Say
from fedel.errors import ServiceError

INSTALL_SECONDS = 1200.0
_READY = ".ready"


@dataclass(frozen=True)
class Package:
    name: str
    version: str

    @property
    def folder(self) -> Path:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "fedel" / "bench" / f"{self.name}-{self.version}"

    def program(self, name: str = "python") -> str:
        return str(self.folder / "bin" / name)

    def install(self, say: Say) -> None:
        """From PyPI as pip is set up here, unless it is there."""
        if (self.folder / _READY).exists():
            return
        say(f"installing {self.name} {self.version} into {self.folder}")
        self._run(sys.executable, "-m", "venv", "--clear", str(self.folder))
        self._run(self.program(), "-m", "pip", "install", "-q", f"{self.name}=={self.version}")
        (self.folder / _READY).touch()

    def _run(self, *words: str) -> None:
        try:
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or error.stdout).strip().splitlines()
            errors = [line for line in lines if line.startswith("ERROR")] or lines
            why = errors[-1] if errors else f"exit code {error.returncode}"
            raise ServiceError(f"{self.name} {self.version} was not installed: {why}") from None
        except subprocess.TimeoutExpired:
            raise ServiceError(
                f"{self.name} {self.version} was not installed in {INSTALL_SECONDS:g} s"
            ) from None


FLOWER = Package("flwr", "1.41.0")
"""The newest whose requirements PyPI could meet when this was written (1.42.0 needs a certifi that it had not);
it still has the gRPC server."""
NVFLARE = Package("nvflare", "2.9.0")
