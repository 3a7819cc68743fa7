"""The tensors of an update that lies in a file, with only a few of its pages in memory.

A fold goes through an update twice: it looks at everything before it adds anything.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping

from fedel.types import Change, Patch

MAX_PRESENT = 4 << 20
"""Bytes of an update that stay in memory, besides the tensor at hand."""


class Pages:
    """A file in memory, of which a few pages are present: the system fetches them when they are read."""

    def __init__(self, handle: int) -> None:
        self._map = mmap.mmap(handle, 0, prot=mmap.PROT_READ)
        self._view = memoryview(self._map)
        self._num_bytes = 0
        """Bytes that were used since pages were last given back."""

    def use(self, offset: int, num_bytes: int) -> memoryview:
        self.count(num_bytes)
        return self._view[offset : offset + num_bytes]

    def count(self, num_bytes: int) -> None:
        """So many bytes will be read next. Those before may go; they come back when they are read again."""
        if self._num_bytes > MAX_PRESENT:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_bytes = 0
        self._num_bytes += num_bytes


class StoredPatches(Mapping[str, Patch | Change]):
    """The patches of a file. Who takes one after the other never has the whole update in memory."""

    def __init__(self, patches: Mapping[str, Patch | Change], sizes: Mapping[str, int], pages: Pages) -> None:
        self._patches, self._sizes, self._pages = patches, sizes, pages

    def __getitem__(self, name: str) -> Patch | Change:
        self._pages.count(self._sizes[name])
        return self._patches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._patches)

    def __len__(self) -> int:
        return len(self._patches)
