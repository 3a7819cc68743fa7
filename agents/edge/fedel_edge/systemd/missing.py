"""``missing.py WHEELS MACHINE PYTHON``: requirements of the wheels in a folder that the folder lacks.

``pip download`` for another Python evaluates conditions such as "only before 3.11" with the Python it runs on.
"""

from __future__ import annotations

import sys
from email.parser import HeaderParser
from pathlib import Path
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

EXTRAS = {"fedel": ("", "edge-own-torch")}
"""Which extras of a wheel are installed; of the others none."""


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
    }
    wheels = {parse_wheel_filename(wheel.name)[0]: wheel for wheel in folder.glob("*.whl")}
    return {
        str(requirement.name) + str(requirement.specifier)
        for name, wheel in wheels.items()
        for extra in EXTRAS.get(name, ("",))
        for requirement in map(Requirement, _requirements(wheel))
        if requirement.marker is None or requirement.marker.evaluate({**device, "extra": extra})
        if canonicalize_name(requirement.name) not in wheels
    }


def _requirements(wheel: Path) -> list[str]:
    with ZipFile(wheel) as opened:
        name = next(n for n in opened.namelist() if n.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(opened.read(name).decode()).get_all("Requires-Dist") or []


if __name__ == "__main__":
    print("\n".join(sorted(missing(Path(sys.argv[1]), *sys.argv[2:]))))
