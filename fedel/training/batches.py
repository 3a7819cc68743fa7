"""Mini-batches of one client: fresh permutations of its samples, the same for the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedel.types import Array, LocalWork


def batch_stream(indices: Array, work: LocalWork, rng: np.random.Generator) -> Iterator[Array]:
    """Endless; a client with fewer samples than a batch uses what it has.

    The short batch at the end of a pass counts where work is measured in epochs, and is left out where it
    is measured in steps: a step has one price then.
    """
    size = min(work.batch_size, len(indices))
    whole = len(indices) // size * size if work.num_steps else len(indices)
    while True:
        order = rng.permutation(indices)
        for start in range(0, whole, size):
            batch = order[start : min(start + size, whole)]
            # Batch norm cannot normalise a single sample, so it gets company.
            yield batch if len(batch) > 1 else np.append(batch, order[0])


def to_torch(
    batch: tuple[Array, Array], device: str | torch.device, compute: str = "exact"
) -> tuple[Tensor, Tensor]:
    """A batch for the model. The order in memory of its input is handed on from layer to layer."""
    x, y = (torch.from_numpy(part).to(device) for part in batch)
    return x.to(memory_format=torch.channels_last) if compute == "fast" and x.ndim == 4 else x, y
