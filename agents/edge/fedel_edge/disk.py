"""Room on the device's disk: files of old runs make way for a new one; a run that is too large is refused."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from pathlib import Path

from fedel.errors import ServiceError
from fedel.files import safe_name
from fedel.types import ModelSpec
from fedel_edge.gate import Limits
from fedel_edge.run_folder import COPIES, STAMP

_log = logging.getLogger(__name__)
_KEPT_PROFILES = 64


def make_room(state_dir: Path, run: str, spec: ModelSpec, in_use: Collection[str], limits: Limits) -> None:
    """Delete folders of runs that this agent no longer takes part in, the oldest first, until the new run fits.

    ``in_use`` are the names of the other runs it takes part in.
    """
    kept = {safe_name(name) for name in in_use}
    folders = [path for path in state_dir.glob("*") if (path / STAMP).is_file() and path.name != safe_name(run)]
    sizes = {path: _size(path) for path in folders}
    needed = COPIES * sum(4 * tensor.size for tensor in spec.tensors)
    for path in sorted(folders, key=lambda path: (path / STAMP).stat().st_mtime):
        if len(sizes) < limits.max_runs and sum(sizes.values()) + needed <= limits.max_disk_bytes:
            break
        if path.name not in kept:
            _log.info("%s: deleted, to make room for run '%s'", path, run)
            shutil.rmtree(path, ignore_errors=True)
            del sizes[path]
    used = sum(sizes.values())
    if used + needed > limits.max_disk_bytes:
        raise ServiceError(
            f"run '{run}' needs up to {needed} bytes in {state_dir}, where other runs hold {used}, and "
            f"limits.max_disk_bytes = {limits.max_disk_bytes}: raise it in the agent's configuration"
        )


def forget_profiles(folder: Path) -> None:
    """Keep the newest profiles; one that is needed again is measured again."""
    files = sorted(folder.glob("profile-*.json"), key=lambda path: path.stat().st_mtime)
    for path in files[:-_KEPT_PROFILES]:
        path.unlink(missing_ok=True)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
