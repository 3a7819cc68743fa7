"""The timing profile that a fleet scales: published Orin figures, a file, counted, or measured once here."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch

from fedel.data.dataset import Dataset
from fedel.errors import ModelError, ProfileError
from fedel.job import RunConfig
from fedel.models.blocks import BlockModel
from fedel.simulation.children import Child
from fedel.training.flops import flops_profile
from fedel.training.orin import orin_profile
from fedel.training.profile_io import load_profile, save_profile
from fedel.training.profiler import cache_key, profile
from fedel.types import TimingProfile

WIDTHS = (0.1, 0.25, 0.5, 0.75)
"""Narrowed models that are timed too, so that HeteroFL has the same profile as every other method."""
ORIN_SIZES = (32, 224)


def base_profile(wanted: str, run: RunConfig, model: BlockModel, data: Dataset) -> TimingProfile:
    """The profile that ``[fleet] base`` names."""
    if wanted == "measured":
        return measured_profile(run, model, data)
    if wanted == "flops":
        batch, _ = data.train_batch(np.arange(min(2, len(data.train))), np.random.default_rng(0))
        return flops_profile(model, torch.from_numpy(batch), run.work.batch_size, WIDTHS)
    if wanted not in ("orin", "auto"):
        return load_profile(Path(wanted), model.spec)
    size = data.input_shape[-1]
    nearest = min(ORIN_SIZES, key=lambda known: abs(math.log(known / size)))
    try:
        if wanted == "auto" and size not in ORIN_SIZES:
            raise ProfileError(f"no Orin figures for samples of {size} pixels")
        return orin_profile(model.spec, run.workload.model, nearest)
    except ProfileError as error:
        if wanted == "orin":
            raise ProfileError(f"[fleet] base = 'orin': {error}; or set it to 'measured'") from None
        return measured_profile(run, model, data)


def measured_profile(run: RunConfig, model: BlockModel, data: Dataset) -> TimingProfile:
    """Measured with one thread on this machine, and kept for the next simulation of the same work."""
    key = cache_key(run, model.spec, data.input_shape, WIDTHS, "cpu", num_threads=1)
    kept = cache_dir() / f"{key}.json"
    if kept.exists():
        return load_profile(kept, model.spec)
    # In its own process: after torch has computed gradients here, a forked worker could not compute any.
    child = Child(lambda _: _measure(run, model, data))
    try:
        child.send(None)
        measured: TimingProfile = child.receive()
    finally:
        child.end()
    save_profile(measured, kept)
    return measured


def cache_dir() -> Path:
    """``$FEDEL_PROFILES``, else ``~/.cache/fedel/profiles``."""
    return Path(os.environ.get("FEDEL_PROFILES") or "~/.cache/fedel/profiles").expanduser()


def _measure(run: RunConfig, model: BlockModel, data: Dataset) -> TimingProfile:
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, len(data.train), run.work.batch_size)
    batch = data.train_batch(rows, rng)

    def fetch() -> object:
        return data.train_batch(rows, rng)

    try:
        return profile(model, batch, run.work, widths=WIDTHS, fetch=fetch)
    except ModelError:
        # The user's own model need not be one that HeteroFL can narrow.
        return profile(model, batch, run.work, fetch=fetch)
