"""The frozen blocks below a window give a sample the same output each time: it can be kept and used again.

A kernel may round differently in a batch of another size, but the place of a sample in its batch changes
nothing. So the frozen blocks see batches of one size only: what is missing in a batch is computed together
with what the batches to come will miss. Training then gives the same bits with the cache as without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from fedel.types import Array

Entrance = Callable[[Array], tuple[Tensor, Tensor]]
"""From the indices of samples to what enters the window, and the targets."""


class PrefixCache:
    """What enters the window, batch by batch, and the targets.

    ``max_bytes`` bounds what is kept: the samples that come first, as many as there is room for. Up to one
    batch more is computed ahead. A batch shorter than ``size``, the last one of an epoch or of a round,
    goes its own way.
    """

    def __init__(
        self, batches: Iterator[Array], entrance: Entrance, num_samples: int, size: int, max_bytes: int
    ) -> None:
        self._batches, self._entrance, self._size = batches, entrance, size
        self._batches_per_pass = num_samples // size
        self._room = max_bytes
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._next: dict[int, tuple[Tensor, Tensor]] = {}
        """Computed ahead; dropped once used."""
        self._ahead: deque[Array] = deque()

    def batches(self) -> Iterator[Array]:
        """In the order in which they came."""
        while True:
            yield self._ahead.popleft() if self._ahead else next(self._batches)

    def take(self, batch: Array) -> tuple[Tensor, Tensor]:
        """What enters the window for the batch that came last, or for a part of it."""
        if len(batch) != self._size:
            return self._entrance(batch)
        missing = self._missing(batch)
        if missing:
            self._compute(self._fill_up(missing, batch))
        samples = batch.tolist()
        found = [self._kept[s] if s in self._kept else self._next.pop(s) for s in samples]
        return torch.stack([h for h, _ in found]), torch.stack([y for _, y in found])

    def _missing(self, batch: Array) -> list[int]:
        return [s for s in batch.tolist() if s not in self._kept and s not in self._next]

    def _fill_up(self, missing: list[int], batch: Array) -> Array:
        """A whole batch: ``missing``, and what the batches of one more pass will miss."""
        wanted = dict.fromkeys(missing)
        for place in range(self._batches_per_pass):
            if len(wanted) >= self._size:
                break
            if place == len(self._ahead):
                self._ahead.append(next(self._batches))
            if len(self._ahead[place]) == self._size:
                wanted |= dict.fromkeys(self._missing(self._ahead[place]))
        wanted |= dict.fromkeys(batch.tolist())  # if nobody else misses anything
        return np.fromiter(wanted, batch.dtype)[: self._size]

    def _compute(self, samples: Array) -> None:
        outputs, targets = self._entrance(samples)
        for sample, h, y in zip(samples.tolist(), outputs, targets, strict=True):
            if sample not in self._kept and sample not in self._next:
                fits = h.nbytes + y.nbytes <= self._room
                self._room -= (h.nbytes + y.nbytes) * fits
                (self._kept if fits else self._next)[sample] = h.clone(), y.clone()
