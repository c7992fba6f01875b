"""What a lookup finds: a prefix, and the tiers that have its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvbm.core.keys import Key
from kvbm.plans import TierName


class Run(NamedTuple):
    """Consecutive blocks of a match that lie in one tier, in the same way."""

    tier: TierName
    slots: list[int]
    alone: bool = False  # each block takes a read of its own, as Catalog.is_alone says


class Match(NamedTuple):
    """The longest prefix that can be brought back, from ``start`` on. Holds nothing: valid until the next change."""

    start: int  # index of the first block
    runs: list[Run]  # may alternate between tiers
    pending: bool  # the next block is being written or looked for right now: asking again soon may find more
    keys: Sequence[Key]  # the blocks that were asked for; a load verifies that the slots still hold them
    changes: int = -1  # of the catalogs at the time of the lookup: while there are no more, the slots hold the keys
    awaited: Key | None = None  # the pending block, where that is not the next of the keys

    @property
    def blocks(self) -> int:
        return sum(len(run.slots) for run in self.runs)

    def cut(self, blocks: int) -> Match:
        """The first ``blocks`` blocks of the match."""
        pending = self.pending and blocks >= self.blocks
        runs: list[Run] = []
        for run in self.runs:
            if blocks <= 0:
                break
            runs.append(run._replace(slots=run.slots[:blocks]))
            blocks -= len(run.slots)
        return Match(self.start, runs, pending, self.keys, self.changes)

    def extended(self, run: Run, keys: Sequence[Key]) -> Match:
        """The match and the blocks after it, which lie in the tier of its last ones."""
        *runs, last = self.runs
        return Match(self.start, [*runs, last._replace(slots=last.slots + run.slots)], False, keys, self.changes)

    def beyond(self, blocks: int) -> Match:
        """The blocks that :meth:`cut` leaves off."""
        runs: list[Run] = []
        at = 0
        for run in self.runs:
            if at + len(run.slots) > blocks:
                runs.append(run._replace(slots=run.slots[max(blocks - at, 0) :]))
            at += len(run.slots)
        return Match(self.start + min(blocks, at), runs, self.pending, self.keys, self.changes)
