"""The secret that the processes of a federation in plain text share; servers answer nobody without it."""

from __future__ import annotations

import secrets
import stat
from pathlib import Path

from fedel.errors import ConfigError
from fedel.files import write_atomic

VARIABLE = "FEDEL_SECRET_FILE"
"""Environment variable that names the file, where ``tls.secret_file`` does not."""
HEADER = "fedel-secret"
"""Metadata of every call."""
_LEAST = 16
_MAKE = "python3 -c 'import secrets; print(secrets.token_urlsafe(32))' > FILE; chmod 600 FILE"


def create(path: Path) -> None:
    """Write a new secret that only this user can read."""
    write_atomic(path, secrets.token_urlsafe(32), mode=0o600)


def read(path: Path) -> str:
    try:
        mode, text = stat.S_IMODE(path.stat().st_mode), path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; make a secret there: {_MAKE}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a secret ({error}); make a new one: {_MAKE}") from None
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read this secret (mode {mode:o}): chmod 600 {path}")
    if len(text) < _LEAST or not text.isprintable() or " " in text:
        raise ConfigError(f"{path}: a secret has at least {_LEAST} letters and no spaces: {_MAKE}")
    return text
