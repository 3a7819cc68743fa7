"""``python docker/sbom.py [FOLDER]``: what the images and the bundle consist of, as CycloneDX 1.6.

They install exactly what ``docker/requirements`` lists. Packages of the base image (Debian, Python) are not in
here: the base image has its own list. The default folder is ``dist``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
KINDS = ("server", "agent", "device")
ENTRY = re.compile(r"^(\S+)==(\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def component(name: str, version: str, hashes: list[str]) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    # One for each wheel: which of them is installed depends on the machine.
    return found | {"hashes": [{"alg": "SHA-256", "content": each} for each in hashes]} if hashes else found


def bom(kind: str, version: str) -> dict[str, Any]:
    text = (ROOT / "docker" / "requirements" / f"{kind}.txt").read_text(encoding="utf-8")
    parts = [component(n, v, re.findall("[0-9a-f]{64}", hashes)) for n, v, hashes in ENTRY.findall(text)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": f"fedel-{kind}", "version": version}},
        "components": [component("fedel", version, []), *parts],
    }


def main(folder: Path) -> None:
    source = (ROOT / "fedel" / "__init__.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.*)"', source, re.MULTILINE)[0]
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        path = folder / f"fedel-{kind}-{version}.cdx.json"
        path.write_text(json.dumps(bom(kind, version), indent=1) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist")
