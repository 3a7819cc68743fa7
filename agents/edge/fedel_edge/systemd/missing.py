"""``missing.py WHEELS MACHINE PYTHON``: what wheels in a folder need on such a device and is not there.

``pip download`` for another Python judges conditions such as "only before 3.11" by the Python it runs with.
"""

from __future__ import annotations

import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename


def missing(folder: Path, machine: str, python: str) -> set[str]:
    device = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    wheels = list(folder.glob("*.whl"))
    there = {parse_wheel_filename(wheel.name)[0] for wheel in wheels}
    return {
        str(requirement.name) + str(requirement.specifier)
        for wheel in wheels
        for requirement in map(Requirement, _requirements(wheel))
        if requirement.marker is None or requirement.marker.evaluate(device)
        if canonicalize_name(requirement.name) not in there
    }


def _requirements(wheel: Path) -> list[str]:
    with ZipFile(wheel) as opened:
        name = next(n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(opened.read(name).decode()).get_all("Requires-Dist") or []


if __name__ == "__main__":
    print("\n".join(sorted(missing(Path(sys.argv[1]), *sys.argv[2:]))))
