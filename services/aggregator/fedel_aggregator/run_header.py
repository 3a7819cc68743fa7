"""What a run is, as its header says: its strategy, its model, and the part of the model that is kept here."""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError

from fedel.errors import FedelError, UpdateRefused
from fedel.files import safe_name
from fedel.roles.gate import objection_to_name
from fedel.serialisation import parse_json
from fedel.strategies import build
from fedel.types import ModelSpec, Strategy
from fedel.v1.aggregator_pb2 import ModelHeader
from fedel.wire import payload
from fedel.wire.codec import spec_from_pb
from fedel_aggregator.errors import MALFORMED, damaged
from fedel_aggregator.protection import protection_of, server_of, staleness_of, upload_of

HEADER_FILE = "run.pb"


def shard_spec(header: ModelHeader) -> ModelSpec:
    """The part of the model that this aggregator keeps; refused if the header makes no sense."""
    if objection := objection_to_name(header.run, "name of the run"):
        raise UpdateRefused("header", objection)
    try:
        staleness_of(header)
    except ValueError as error:
        raise UpdateRefused("header", str(error)) from None
    strategy, spec = strategy_of(header), spec_from_pb(header.spec)
    _check_settings(header, strategy, spec)
    payload.check(header.tensors, spec)
    partial = [entry.name for entry in header.tensors if entry.where.ByteSize()]
    if partial or not header.tensors:
        raise UpdateRefused("shape", f"a first model consists of whole tensors; these are not: {partial}")
    return spec.subset({entry.name for entry in header.tensors})


def strategy_of(header: ModelHeader) -> Strategy:
    try:
        return build(parse_json(header.strategy_json))
    except FedelError as error:
        raise UpdateRefused("header", str(error)) from None
    except MALFORMED as error:
        raise UpdateRefused("header", f"strategy_json is not valid JSON: {error}") from None


def _check_settings(header: ModelHeader, strategy: Strategy, spec: ModelSpec) -> None:
    try:
        protection, upload = protection_of(header, strategy, spec), upload_of(header)
        server_of(header)
    except FedelError as error:
        raise UpdateRefused("header", str(error)) from None
    except MALFORMED as error:
        raise UpdateRefused("header", f"a table of the settings is not valid JSON: {error}") from None
    if protection.secure and upload.compression != "none":
        raise UpdateRefused(
            "header", "a run with secure aggregation has no compression: it sums masked tensors"
        )


def read_code_hash(folder: Path) -> str:
    """Which code the run's method is in; empty if it came with none, or if its header cannot be read."""
    try:
        return ModelHeader.FromString((folder / HEADER_FILE).read_bytes()).code_sha256
    except (OSError, DecodeError):
        return ""


def read_run_header(folder: Path) -> tuple[ModelHeader, ModelSpec]:
    """The header in a run's folder, and the part of the model that is kept there."""
    path = folder / HEADER_FILE
    try:
        header = ModelHeader.FromString(path.read_bytes())
        spec = shard_spec(header)
    except FileNotFoundError:
        raise damaged("run", path, "it is missing") from None
    except (DecodeError, FedelError, *MALFORMED) as error:
        raise damaged("run", path, error) from None
    if safe_name(header.run) != folder.name:
        raise damaged("run", path, f"it is the header of run '{header.run}', not of this folder's")
    return header, spec
