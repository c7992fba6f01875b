"""Where the blocks of a prompt are: in one of vLLM's tables, or in several.

Layers that see different parts of a prompt are in different KV cache groups, each with a block table of its own: with a
sliding window of 1,024 tokens vLLM lets go of what lies farther back, where other layers keep all. So sixteen tokens
have a block in every group, or have it no more.

All groups take their blocks from one pool. They have as many layers each, and the first layers of all lie in the same
memory, as do the second, and so on: where a block's bytes are depends on its number, not on its group. So a tier keeps
each of them as a block like any other, under a key that tells the groups apart, and nobody else needs to know of them.

A prefix can be brought back when every group has what its layers see from the prefix's end: all of it, or the blocks of
one window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbm.core.keys import Key, in_group
from kvbm.core.manager import BlockManager, Match, Run
from kvbm.plans import Tier

Tables = Sequence[Sequence[int]]

_NULL = 0  # the block that stands in a table of vLLM's where there is none


class Groups(Protocol):
    apart: bool  # blocks of a prefix are in several places, so that it is loaded as a whole, outside of the step

    def find(self, manager: BlockManager, keys: Sequence[Key], start: int, limit: int, patient: bool = True) -> Match:
        """The longest prefix that can be brought back, see :meth:`BlockManager.lookup`."""

    def place(self, manager: BlockManager, match: Match, tables: Tables, count: int) -> tuple[Match, Sequence[int]]:
        """(what to load for the first ``count`` blocks of a match, the engine's blocks that it goes to). There is less
        of the first than of the second if it is not all there any more."""

    def targets(self, tables: Tables, start: int, count: int) -> Sequence[int]:
        """The engine's blocks that so many blocks of a prompt are in."""

    def completed(
        self, keys: Sequence[Key], tables: Tables, first: int, end: int, computed: int
    ) -> tuple[Sequence[Key], Sequence[int]]:
        """(keys, blocks) of a prompt's blocks ``first`` to ``end``, which a step completes that began with so many
        ``computed`` tokens."""

    def used(self, keys: Sequence[Key], blocks: int) -> Sequence[Key]:
        """What a request has made use of that has come so far, the front first."""

    def moved(self, blocks: int) -> int:
        """How many blocks are moved for so many of a prompt."""


class OneGroup:
    """All layers see all tokens."""

    apart = False

    def find(self, manager: BlockManager, keys: Sequence[Key], start: int, limit: int, patient: bool = True) -> Match:
        return manager.lookup(keys, start, limit, patient=patient)

    def place(self, manager: BlockManager, match: Match, tables: Tables, count: int) -> tuple[Match, Sequence[int]]:
        return match.cut(count), self.targets(tables, match.start, count)

    def targets(self, tables: Tables, start: int, count: int) -> Sequence[int]:
        return tables[0][start : start + count]

    def completed(
        self, keys: Sequence[Key], tables: Tables, first: int, end: int, computed: int
    ) -> tuple[Sequence[Key], Sequence[int]]:
        return keys[first:end], tables[0][first:end]

    def used(self, keys: Sequence[Key], blocks: int) -> Sequence[Key]:
        return keys[:blocks]

    def moved(self, blocks: int) -> int:
        return blocks


class SeveralGroups:
    """``windows``: how many tokens the layers of each group see, the next one included; 0 for all of them."""

    apart = True

    def __init__(self, windows: Sequence[int], block_size: int) -> None:
        self._windows = windows
        self._seeing_all = [group for group, window in enumerate(windows) if not window]
        self._sliding = [group for group, window in enumerate(windows) if window]
        self._block_size = block_size

    def find(self, manager: BlockManager, keys: Sequence[Key], start: int, limit: int, patient: bool = True) -> Match:
        """Where they are in several tiers it counts as a match in the slowest. It has no slots yet: which ones are
        wanted turns out when vLLM has made room."""
        wanted = keys[:limit]
        end, pending = self._reach(manager, wanted, start)
        tiers = [manager.tier_of(key) for key in self._needed(wanted, start, end)]
        slowest = next((tier for tier in reversed(manager.pools) if tier in tiers), Tier.HOST)
        runs = [Run(slowest, [-1] * (end - start))] if end > start else []
        return Match(start, runs, pending, wanted)

    def _reach(self, manager: BlockManager, keys: Sequence[Key], start: int) -> tuple[int, bool]:
        """(where the longest prefix ends of which every group has what it needs, whether something that a longer one
        lacks is being written right now)"""
        end, pending = len(keys), False
        for group in self._seeing_all:
            for at in range(start, end):
                key = in_group(keys[at], group)
                if manager.tier_of(key) is None:
                    end, pending = at, pending or manager.is_writing(key)
                    break
        before = None
        while end != before:
            before = end
            for group in self._sliding:
                # Without a block no prefix ends behind it, until a window has passed over it.
                for at in range(end - 1, max(start, self._first(group, end * self._block_size)) - 1, -1):
                    key = in_group(keys[at], group)
                    if manager.tier_of(key) is None:
                        end, pending = at, pending or manager.is_writing(key)
        return end, pending

    def _first(self, group: int, tokens: int) -> int:
        """The first block that a group's layers see from the token behind so many."""
        window = self._windows[group]
        return max(0, tokens - window + 1) // self._block_size if window else 0

    def _needed(self, keys: Sequence[Key], start: int, end: int) -> list[Key]:
        """For a prefix that ends here, of which the engine has the beginning."""
        return [
            in_group(key, group)
            for group in range(len(self._windows))
            for key in keys[max(start, self._first(group, end * self._block_size)) : end]
        ]

    def place(self, manager: BlockManager, match: Match, tables: Tables, count: int) -> tuple[Match, Sequence[int]]:
        """All that vLLM has made room for, whatever we think that it needs: it will take all of it for computed."""
        end = match.start + count
        wanted = [
            in_group(match.keys[i], group)
            for group, table in enumerate(tables)
            for i in range(match.start, end)
            if table[i] != _NULL
        ]
        return manager.lookup(wanted, patient=False), self.targets(tables, match.start, count)

    def targets(self, tables: Tables, start: int, count: int) -> Sequence[int]:
        return [block for table in tables for block in table[start : start + count] if block != _NULL]

    def completed(
        self, keys: Sequence[Key], tables: Tables, first: int, end: int, computed: int
    ) -> tuple[Sequence[Key], Sequence[int]]:
        """But for those that vLLM had let go of by the beginning of the step: they may be somebody else's."""
        there = [
            (in_group(keys[i], group), table[i])
            for group, table in enumerate(tables)
            for i in range(max(first, self._first(group, computed)), end)
            if table[i] != _NULL
        ]
        return [key for key, _ in there], [block for _, block in there]

    def used(self, keys: Sequence[Key], blocks: int) -> Sequence[Key]:
        """What lies behind a window is as old as it was: it is of use to who turns off there."""
        return self._needed(keys, 0, blocks)

    def moved(self, blocks: int) -> int:
        tokens = blocks * self._block_size
        return sum(blocks - self._first(group, tokens) for group in range(len(self._windows)))
