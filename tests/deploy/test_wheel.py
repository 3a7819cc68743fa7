"""The wheel: our five import names, their data files, the licence, and the dependencies of every extra."""

from __future__ import annotations

import shutil
import subprocess
import sys
from email.message import Message
from email.parser import HeaderParser
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.deploy.circles import ROOT

OURS = {"fedel", "fedel_services", "fedel_coordinator", "fedel_aggregator", "fedel_edge"}
BASE = {
    "cryptography",
    "grpcio",
    "grpcio-health-checking",
    "isal",
    "msgspec",
    "numpy",
    "prometheus-client",
    "protobuf",
    "tomli",
}
EXTRAS = {
    "server": {"aiohttp", "grpcio-reflection", "sqlalchemy"},
    "postgres": {"psycopg[binary]"},
    "edge": {"fedel[edge-own-torch]", "torch"},
    "edge-own-torch": {"pillow", "rich", "safetensors"},
    "desk": {"fedel[edge,plots,privacy,server]", "scikit-learn", "tensorboardX"},
    "plots": {"matplotlib"},
    "privacy": {"dp-accounting"},
    "fuzz": {"atheris"},
    "export": {"onnx", "onnxscript"},
    "otel": {"opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-sdk"},
    "text": {"transformers", "sentencepiece"},
    "ray": {"ray"},
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    """Built in a copy: setuptools leaves a build folder, and would use old files from it the next time."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("fedel", "services", "agents", "grafana", "k8s", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*pip, "--wheel-dir", source / "dist", source], capture_output=True, text=True, check=False
    )
    assert 0 == done.returncode, done.stderr
    (path,) = (source / "dist").glob("fedel-*.whl")
    return ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: ZipFile) -> Message:
    return HeaderParser().parsestr(_text(wheel, "METADATA"))


def _text(wheel: ZipFile, name: str) -> str:
    (path,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_import_names(wheel: ZipFile) -> None:
    assert OURS == set(_text(wheel, "top_level.txt").split())
    folders = {entry.partition("/")[0] for entry in wheel.namelist()}
    assert OURS == {folder for folder in folders if not folder.endswith(".dist-info")}


def test_requirements(metadata: Message) -> None:
    found: dict[str, set[str]] = {}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist") or ()):
        *_, extra = str(requirement.marker or "").rpartition("extra == ")
        named = extra.strip('"') if "extra ==" in str(requirement.marker or "") else ""
        brackets = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
        found.setdefault(named, set()).add(requirement.name + brackets)
    found.pop("dev")
    assert {"": BASE, **EXTRAS} == found


def test_licence_and_authors(wheel: ZipFile, metadata: Message) -> None:
    assert _text(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert ("Apache-2.0", "The FedEL authors") == (metadata["License-Expression"], metadata["Author"])


@pytest.mark.parametrize(
    "file",
    [
        "fedel/py.typed",
        "fedel/cli/demo.toml",
        "fedel/experiments/paper.toml",
        "fedel/experiments/scales/small.toml",
        "fedel_coordinator/web/static/index.html",
        "fedel_edge/systemd/fedel-agent.service",
        "fedel_edge/systemd/fedel-agent.sysusers",
    ],
)
def test_data_files(wheel: ZipFile, file: str) -> None:
    assert file in wheel.namelist()


def test_docs_install_the_wheel_that_is_made(wheel: ZipFile) -> None:
    assert wheel.filename is not None
    name = wheel.filename.rpartition("/")[2]
    assert f"pip install './{name}[edge-own-torch]'" in (ROOT / "docs" / "jetson.md").read_text(
        encoding="utf-8"
    )
