"""The machine that was measured on: what it is, and how busy it is."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("fedel", "grpcio", "numpy", "protobuf")


def load() -> float:
    """Mean number of processes that wanted a core in the last minute."""
    return round(os.getloadavg()[0], 2)


def describe() -> dict[str, Any]:
    return {
        "cores": os.cpu_count() or 1,
        "model": cpu_model(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def available_bytes() -> int:
    """Memory that can be used without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
