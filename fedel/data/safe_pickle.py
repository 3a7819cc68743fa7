"""Reads the pickle files of CIFAR-10 without ever running code from them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from fedel.errors import DataError

_RECONSTRUCT = np.zeros(0).__reduce__()[0]
"""numpy's constructor of empty arrays; its module differs between versions, so it is not imported by name."""


def _dtype(code: str | bytes, *_: object) -> np.dtype[Any]:
    """``numpy.dtype`` for numbers only, without the flags that new numpy versions warn about."""
    kind = np.dtype(code.decode("ascii") if isinstance(code, bytes) else code)
    if kind.kind not in "biuf":
        raise pickle.UnpicklingError(f"arrays of dtype {kind} are not allowed")
    return kind


def _encode(text: str, encoding: str) -> bytes:
    """The way Python 3 writes bytes in the old pickle protocols."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r} is not allowed")
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("_codecs", "encode"): _encode,
}


class _NumbersOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it uses {module}.{name}, which is not allowed") from None


def load_numbers(path: Path) -> dict[bytes, Any]:
    """Read a dictionary of arrays, lists and byte strings from a pickle; anything else is a DataError."""
    try:
        with path.open("rb") as file:
            content = _NumbersOnly(file, encoding="bytes").load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        AttributeError,
    ) as problem:
        raise DataError(
            f"{path}: not a readable batch of numbers ({problem}); download the file again"
        ) from problem
    except OSError as problem:
        raise DataError(f"{path}: cannot be read ({problem.strerror})") from problem
    if not isinstance(content, dict):
        raise DataError(f"{path}: contains a {type(content).__name__}, expected a dictionary of arrays")
    return {k.encode() if isinstance(k, str) else k: v for k, v in content.items()}
