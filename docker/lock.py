"""``python docker/lock.py [WHEEL ...]``: write ``docker/requirements``, each package with its hashes.

Versions come from constraints.txt, what needs what from the packages that are installed here (`make setup`),
hashes from PyPI: those of every wheel that fits Python 3.11 on Linux, on x86-64 and on 64-bit ARM. For a build
that PyPI does not have, such as torch for the CPU, name the wheel: its hash is added.
"""

from __future__ import annotations

import hashlib
import re
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docker" / "requirements"
PYTHON = (3, 11)
TARGET = {"python_version": "3.11", "python_full_version": "3.11.0", "sys_platform": "linux"}
GPU = ("cuda-", "nvidia-", "triton")
"""Only the builds of torch with CUDA need these; the image has the one for the CPU."""
SETS = {
    "build": ("setuptools",),
    "server": ("fedel[postgres,server]",),
    "agent": ("fedel[edge,plots]",),
    "device": ("fedel[edge-own-torch]", "pip"),
}
"""What builds our wheel, what is in the two images, and what is in the bundle for a device."""
INDEX = "https://pypi.org/simple"
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


def fitting_tags() -> frozenset[Tag]:
    glibc = [f"manylinux_2_{minor}" for minor in range(5, 37)]
    platforms = [f"{each}_{machine}" for machine in ("x86_64", "aarch64") for each in (*glibc, "manylinux2014")]
    return frozenset((*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, "cp311", platforms)))


def hashes(name: str, version: str, tags: frozenset[Tag]) -> Iterator[str]:
    """SHA-256 of the wheels of this version that fit."""
    with urllib.request.urlopen(f"{INDEX}/{name}/", timeout=60) as answer:  # INDEX is https
        page = answer.read().decode()
    for file, digest in re.findall(r"/([^/\"#]+\.whl)#sha256=([0-9a-f]{64})", page):
        _, found, _, fits = parse_wheel_filename(file)
        if str(found) == version and fits & tags:
            yield digest


def main(wheels: Sequence[str]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines if "==" in line)}
    sets, tags = {kind: sorted(needed(*texts)) for kind, texts in SETS.items()}, fitting_tags()
    every: set[str] = set().union(*sets.values())
    known = {name: set(hashes(name, pins[name], tags)) for name in every}
    for wheel in map(Path, wheels):
        known[parse_wheel_filename(wheel.name)[0]].add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    for kind, names in sets.items():
        entries = [_entry(f"{name}=={pins[name]}", sorted(known[name])) for name in names]
        (FOLDER / f"{kind}.txt").write_text("\n".join([HEADER, *entries, ""]), encoding="utf-8")


def _entry(pin: str, digests: Sequence[str]) -> str:
    if not digests:
        raise SystemExit(f"{pin}: PyPI has no wheel that fits; name one")
    return " \\\n    ".join((pin, *(f"--hash=sha256:{each}" for each in digests)))


if __name__ == "__main__":
    main(sys.argv[1:])
