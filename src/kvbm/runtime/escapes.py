"""How many escapes packed blocks have, by a sample: it tells how near this model's KV is to not fitting its slots."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable

import numpy as np

from kvbm.transfer.base import Slab
from kvbm.transfer.layout import BlockLayout
from kvbm.transfer.packing import OVERFLOW, Tile

SAMPLE_SECONDS = 1.0


class EscapeSample:
    """Looks at one block of a store, at most once in ``SAMPLE_SECONDS``: it reads a byte of each tile."""

    def __init__(self, layout: BlockLayout, slab: Slab, clock: Callable[[], float] = time.monotonic) -> None:
        tile = Tile(layout.tile_values)
        tiles = layout.block_bytes // tile.size
        memory = (ctypes.c_uint8 * (slab.slots * slab.slot_bytes)).from_address(slab.address)
        strides = (slab.slot_bytes, tile.size)
        self._counts = np.ndarray((slab.slots, tiles), np.uint8, memoryview(memory), tile.count, strides)
        self._values = tiles * tile.values
        self._clock = clock
        self._due = clock()

    def ratio(self, slots: Iterable[int]) -> float | None:
        """The share of escapes among the values of the first of these blocks that fits; None for none, or too soon."""
        now = self._clock()
        if now < self._due:
            return None
        for slot in slots:
            counts = self._counts[slot]
            if counts.max() != OVERFLOW:
                self._due = now + SAMPLE_SECONDS
                return float(counts.sum()) / self._values
        return None
