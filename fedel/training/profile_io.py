"""Timing profiles as JSON files: written whole or not at all, checked when read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from fedel.errors import ProfileError
from fedel.files import write_atomic
from fedel.serialisation import parse_json
from fedel.types import BlockBytes, BlockTime, MemoryUse, ModelSpec, TensorTime, TimingProfile, WidthTime

FORMAT = 1
"""Raised whenever a reader of the old format could misread the new one."""


def to_json(profile: TimingProfile) -> str:
    return json.dumps({"format": FORMAT, **asdict(profile)}, indent=1)


def save_profile(profile: TimingProfile, path: Path) -> None:
    write_atomic(path, to_json(profile) + "\n")


def load_profile(path: Path, spec: ModelSpec | None = None) -> TimingProfile:
    """Read a profile; with ``spec`` it must be one of that model."""
    try:
        record = parse_json(path.read_text())
    except OSError as error:
        raise ProfileError(
            f"cannot read timing profile {path}: {error.strerror}; make one with {_HINT}"
        ) from error
    except ValueError as error:
        raise ProfileError(f"timing profile {path} is damaged: {error}; make it again with {_HINT}") from error
    try:
        profile = _parse(record)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ProfileError(f"timing profile {path} is damaged: {what}; make it again with {_HINT}") from error
    if spec is not None:
        check_profile(profile, spec, str(path))
    return profile


def check_profile(profile: TimingProfile, spec: ModelSpec, where: str = "the timing profile") -> None:
    """Raise ProfileError unless the profile names exactly the weights and blocks of ``spec``, and was measured
    with exits of the same size, if it says so."""
    measured = [(t.name, t.block) for t in profile.tensors]
    wanted = [(t.name, t.block) for t in spec.weights]
    if measured == wanted and len(profile.blocks) == spec.num_blocks:
        _check_exits(profile, spec, where)
        return
    odd = next((name for name, _ in wanted if name not in profile.by_name), None)
    odd = odd or next((name for name, _ in measured if name not in spec.by_name), None)
    raise ProfileError(
        f"{where} is of another model: it has {len(measured)} tensors in {len(profile.blocks)} blocks of"
        f" '{profile.model}', but '{spec.name}' has {len(wanted)} in {spec.num_blocks}"
        + (f" (first difference: '{odd}')" if odd else "")
        + f"; make one of this model with {_HINT}"
    )


def _check_exits(profile: TimingProfile, spec: ModelSpec, where: str) -> None:
    sizes = zip(spec.block_names, profile.exit_sizes, spec.exit_sizes, strict=False)
    for block, measured, wanted in sizes:
        if measured != wanted:
            raise ProfileError(
                f"{where} was measured with other exits: the one after block '{block}' had {measured:,} values,"
                f" in this model it has {wanted:,}; make one of this model with {_HINT}, for the same input,"
                " classes, width and exit_features"
            )


_BLOCK_PARTS = ("forward", "exit_forward", "exit_backward", "frozen_forward")
_HINT = "`fedel profile --model NAME --out FILE.json`"


def _parse(record: Any) -> TimingProfile:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"not a timing profile of format {FORMAT}")
    profile = TimingProfile(
        device=str(record["device"]),
        model=str(record["model"]),
        batch_size=int(record["batch_size"]),
        tensors=tuple(
            TensorTime(
                str(t["name"]), int(t["block"]), _seconds(t, "grad_seconds"), _seconds(t, "update_seconds")
            )
            for t in record["tensors"]
        ),
        blocks=tuple(
            BlockTime(*(_seconds(b, f"{part}_seconds") for part in _BLOCK_PARTS)) for b in record["blocks"]
        ),
        widths=tuple(
            WidthTime(float(w["width"]), _seconds(w, "forward_seconds"), _seconds(w, "backward_seconds"))
            for w in record["widths"]
        ),
        overhead_seconds=_seconds(record, "overhead_seconds"),
        calibration=_seconds(record, "calibration"),
        source=str(record["source"]),
        memory=_memory(record.get("memory"), len(record["blocks"])),
        exit_sizes=tuple(map(int, record.get("exit_sizes", ()))),
    )
    if not profile.tensors or any(not 1 <= t.block <= len(profile.blocks) for t in profile.tensors):
        raise ValueError("a tensor stands in a block that is not there")
    return profile


def _memory(record: Any, num_blocks: int) -> MemoryUse | None:
    """Files from before memory was measured have none."""
    if record is None:
        return None
    blocks = tuple(
        BlockBytes(**{f.name: _count(b, f.name) for f in fields(BlockBytes)}) for b in record["blocks"]
    )
    if len(blocks) != num_blocks:
        raise ValueError(f"it has memory of {len(blocks)} blocks and seconds of {num_blocks}")
    numbers = {f.name: _count(record, f.name) for f in fields(MemoryUse) if f.name != "blocks"}
    return MemoryUse(blocks=blocks, **numbers)


def _count(record: dict[str, Any], key: str) -> int:
    value = int(record[key])
    if value < 0:
        raise ValueError(f"{key} is {value}, which is not a number of bytes")
    return value


def _seconds(record: dict[str, Any], key: str) -> float:
    value = float(record[key])
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{key} is {value}, which is not a time")
    return value
