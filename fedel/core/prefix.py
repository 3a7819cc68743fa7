"""What a cache of the frozen blocks' outputs saves (``fedel/training/prefix_cache.py``)."""

from __future__ import annotations

from collections.abc import Collection

from fedel.core.memory_budget import step_bytes
from fedel.types import LocalWork, ModelSpec, TimingProfile, Window


def room_for(
    spec: ModelSpec,
    profile: TimingProfile,
    selected: Collection[str],
    window: Window,
    wanted_bytes: int,
    limit_bytes: int,
) -> int:
    """Bytes of cache: as many as wanted, but no more than training leaves of the device's limit."""
    if not limit_bytes or profile.memory is None or window.end == 1:
        return wanted_bytes
    computed_ahead = profile.memory.blocks[window.end - 2].output_bytes
    left = limit_bytes - step_bytes(spec, profile.memory, selected, window) - computed_ahead
    return max(0, min(wanted_bytes, left))


def bytes_per_sample(profile: TimingProfile, window: Window) -> float:
    """What enters the window for one sample; 0 where memory was not measured."""
    if profile.memory is None or window.end == 1:
        return 0.0
    return profile.memory.blocks[window.end - 2].output_bytes / profile.batch_size


def frozen_steps(
    work: LocalWork, num_samples: int, num_steps: int, sample_bytes: float, max_bytes: int
) -> float:
    """How many of a round's steps pay the forward pass of the frozen blocks, on average over shuffles.

    The first pass over the data pays in full; later ones pay for the samples that found no room. Three passes
    over 100 samples with room for all of them, for half of them, and for none:

    >>> [frozen_steps(LocalWork(batch_size=10), 100, 30, 8.0, room) for room in (800, 400, 0)]
    [10.0, 20.0, 30.0]

    The short batch at the end of an epoch is not kept; here the fourth of four:

    >>> frozen_steps(LocalWork(num_steps=0, batch_size=32), 100, 20, 8.0, 800)
    8.0
    """
    size = min(work.batch_size, num_samples)
    first = num_samples // size
    short = 0 if work.num_steps or num_samples % size == 0 else 1
    passes, rest = divmod(num_steps, first + short)
    if sample_bytes <= 0 or passes == 0:
        return float(num_steps)
    missed = max(0.0, 1 - max_bytes // sample_bytes / num_samples)
    later = (passes - 1) * first + min(rest, first)
    # In steps a pass leaves a few samples out; the next pass meets them for the first time.
    left_out = min(later, 1) if num_samples % size and not short else 0
    return min(float(num_steps), first + later * missed + left_out * (1 - missed) + short * passes)
