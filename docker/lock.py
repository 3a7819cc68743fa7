"""``python docker/lock.py [WHEEL ...]``: write ``docker/requirements``, each package with its hashes.

Versions come from constraints.txt, what needs what from the packages that are installed here (`make setup`),
hashes from pip's index: those of the wheels for Python 3.11 on Linux, on x86-64 and on 64-bit ARM. For a build
that the index does not have, such as torch for the CPU, name the wheel: its hash is added.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docker" / "requirements"
PYTHON = "3.11"
MACHINES = ("x86_64", "aarch64")
GLIBC = (36, 31)
"""Of the images (Debian 12) and of JetPack 5 (Ubuntu 20.04): which wheel fits depends on it."""
TARGET = {"python_version": "3.11", "python_full_version": "3.11.0", "sys_platform": "linux"}
GPU = ("cuda-", "nvidia-", "triton")
"""Only the builds of torch with CUDA need these; the image has the one for the CPU."""
SETS = {
    "build": ("setuptools",),
    "server": ("fedel[otel,postgres,server]",),
    "agent": ("fedel[edge,plots]",),
    "device": ("fedel[edge-own-torch]", "pip"),
}
"""What builds our wheel, what is in the two images, and what is in the bundle for a device."""
HEADER = "# Made by docker/lock.py from constraints.txt: `make lock`."


def needed(*texts: str) -> set[str]:
    """Everything that these requirements need on Linux, except our own package."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in texts]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        fresh = str(requirement) not in found
        found |= {name, str(requirement)}
        for extra in ("", *requirement.extras) if fresh else ():
            for other in map(Requirement, requires(name) or ()):
                applies = other.marker is None or other.marker.evaluate({**TARGET, "extra": extra})
                if applies and not other.name.startswith(GPU):
                    waiting.append(other)
    return {name for name in found if re.fullmatch("[a-z0-9-]+", name)} - {"fedel"}


def hashes(pins: Sequence[str], machine: str, newest: int) -> dict[str, str]:
    """SHA-256 of the wheel that pip would install on this kind of machine, by name; nothing is installed."""
    # The newest first, as on a machine that has all of them.
    glibc = [f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)]
    platforms = [word for each in (*glibc, f"manylinux2014_{machine}") for word in ("--platform", each)]
    options = [
        "--dry-run",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
        "--only-binary",
        ":all:",
        "--report",
        "-",
    ]
    target = ["--target", "unused", "--python-version", PYTHON, "--implementation", "cp"]
    command = [sys.executable, "-m", "pip", "install", *options, *target, *platforms, *pins]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {
        canonicalize_name(each["metadata"]["name"]): each["download_info"]["archive_info"]["hashes"]["sha256"]
        for each in report["install"]
    }


def main(wheels: Sequence[str]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if "==" in line)}
    sets = {kind: sorted(needed(*texts)) for kind, texts in SETS.items()}
    every = sorted(set().union(*sets.values()))
    exact = [f"{name}=={pins[name]}" for name in every]
    found = [hashes(exact, machine, newest) for machine in MACHINES for newest in GLIBC]
    known = {name: {each[name] for each in found} for name in every}
    for wheel in map(Path, wheels):
        known[parse_wheel_filename(wheel.name)[0]].add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    for kind, names in sets.items():
        entries = [_entry(f"{name}=={pins[name]}", sorted(known[name])) for name in names]
        (FOLDER / f"{kind}.txt").write_text("\n".join([HEADER, *entries, ""]), encoding="utf-8")


def _entry(pin: str, digests: Sequence[str]) -> str:
    if not digests:
        raise SystemExit(f"{pin}: there is no wheel that fits; name one")
    return " \\\n    ".join((pin, *(f"--hash=sha256:{each}" for each in digests)))


if __name__ == "__main__":
    main(sys.argv[1:])
