"""Counts blocks that do not fit a packed slot, and warns when packing loses more than it gains."""

from __future__ import annotations

import logging

from kvbm.core.counts import Counts

logger = logging.getLogger("kvbm")

# Packing makes room for a third more blocks, which is not worth losing more than a few.
_MAX_SHARE = 0.05
_MIN_BLOCKS = 100


class Unpackable:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._has_warned = False

    def add(self, blocks: int) -> None:
        counts = self._counts
        counts.unpackable_blocks += blocks
        total = counts.unpackable_blocks + counts.offloaded_blocks
        if not self._has_warned and counts.unpackable_blocks > max(_MIN_BLOCKS, _MAX_SHARE * total):
            self._has_warned = True
            logger.warning(
                "%d of %d blocks do not fit a packed slot and are not kept. Set KVBM_PACK=off and restart the engine.",
                counts.unpackable_blocks, total,
            )  # fmt: skip
