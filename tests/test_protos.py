"""The committed stubs are what the protos say."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROTOS = sorted((ROOT / "protos" / "fedel" / "v1").glob("*.proto"))


def test_the_stubs_are_up_to_date(tmp_path):
    plugins = Path(sys.executable).parent
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{ROOT / 'protos'}",
        f"--python_out={tmp_path}",
        f"--grpc_python_out={tmp_path}",
        f"--mypy_out=quiet:{tmp_path}",
        f"--mypy_grpc_out=quiet:{tmp_path}",
        f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
        *map(str, PROTOS),
    ]
    subprocess.run(command, check=True, capture_output=True)
    committed = ROOT / "fedel" / "v1"
    for path in sorted(committed.glob("*_pb2*.py*")):
        assert path.read_text() == (tmp_path / "fedel" / "v1" / path.name).read_text(), (
            f"run `make protos`: {path.name}"
        )


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_field_and_value_has_a_sentence(path):
    lines = path.read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        declares = line.strip().endswith(";") and "=" in line and not line.startswith(("syntax", "package"))
        if declares:
            assert before.strip().startswith("//"), f"{path.name}: no comment above {line.strip()!r}"
