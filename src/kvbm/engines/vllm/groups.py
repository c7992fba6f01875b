"""Where the blocks of a prompt are: in one of vLLM's tables, or in several.

Layers that see different parts of a prompt are in different KV cache groups, each with a block table of its own: with a
sliding window of 1,024 tokens vLLM frees the blocks farther back, where other layers keep all blocks. So sixteen tokens
have a block in each group until vLLM frees it there.

Other layers keep no KV but a state (Mamba, gated delta net, short convolution). vLLM saves it at some block boundaries,
each time in a block of its own, and offers those blocks in the step that fills them. To go on from a boundary, a
request needs the one block that was saved there.

All groups take their blocks from one pool. They have equally many layers, and the first layers of all groups use the
same memory, as do the second, and so on: the place of a block's bytes depends on its number, not on its group. So a
tier keeps each of them as a block like any other, under a key that tells the groups apart. No other module handles
groups.

A prefix can be loaded when the tiers hold, for every group, the blocks that its layers see from the prefix's end: all
blocks, those of one window, or the state at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress, product
from typing import NamedTuple

from kvbm.core.catalog import Hint
from kvbm.core.keys import Key, in_group
from kvbm.core.manager import BlockManager
from kvbm.core.match import Match, Run
from kvbm.plans import TierName

Tables = Sequence[Sequence[int]]  # block 0 stands where there is none

# The window of a group whose layers keep a state.
STATE = -1


class Offer(NamedTuple):
    """A block with the state of a group's layers after so many tokens of a request."""

    group: int
    block: int
    tokens: int


class Groups:
    """All layers see all tokens, and have their blocks in one table."""

    apart = False  # True: a prefix has blocks in several places, so it is loaded as a whole, outside of the step
    # The group whose blocks KV events tell of, for all groups. None: no events, because a prefix with all blocks of any
    # group may still not come back.
    announced: int | None = 0

    def announced_keys(self, keys: Sequence[Key]) -> Sequence[Key]:
        """The keys of a prompt's blocks in that group."""
        return keys

    def find(
        self,
        manager: BlockManager,
        keys: Sequence[Key],
        start: int,
        limit: int,
        wait_for_writers: bool = True,
        hint: Hint | None = None,
    ) -> Match:
        """The longest prefix that can be brought back, see :meth:`BlockManager.lookup`."""
        return manager.lookup(keys, start, limit, wait_for_writers=wait_for_writers, hint=hint)

    def place(self, manager: BlockManager, match: Match, tables: Tables, count: int) -> tuple[Match, Sequence[int]]:
        """(match to load for the first ``count`` blocks, the engine's blocks to fill). The match is shorter than the
        list of blocks if a tier has evicted some meanwhile."""
        return match.cut(count), self.targets(tables, match.start, count)

    def targets(self, tables: Tables, start: int, count: int) -> Sequence[int]:
        """The engine's blocks that so many blocks of a prompt are in."""
        return tables[0][start : start + count]

    def completed(
        self, keys: Sequence[Key], tables: Tables, first: int, end: int, computed: int, offers: Sequence[Offer] = ()
    ) -> tuple[Sequence[Key], Sequence[int]]:
        """(keys, blocks) of a prompt's blocks ``first`` to ``end``, which a step completes that began with so many
        ``computed`` tokens, and of the states that vLLM offers up to there."""
        return keys[first:end], tables[0][first:end]

    def found_states(self, tables: Tables, computed: int) -> list[Offer]:
        """The states that a request goes on from which starts behind so many tokens, in its first step."""
        return []

    def used(self, keys: Sequence[Key], blocks: int) -> Sequence[Key]:
        """The keys of the blocks that a request has used up to this position, the front first."""
        return keys[:blocks]

    def moved(self, blocks: int) -> int:
        """How many blocks are moved for so many of a prompt."""
        return blocks


class SeveralGroups(Groups):
    """``windows``: how many tokens the layers of each group see, the next one included; 0 for all of them, STATE for
    layers that keep a state."""

    apart = True

    def __init__(self, windows: Sequence[int], block_size: int) -> None:
        # A state needs the block that the last token is in, as a window does of that token and the next.
        self._windows = [2 if window == STATE else window for window in windows]
        self._states = [window == STATE for window in windows]
        self._seeing_all = [group for group, window in enumerate(windows) if not window]
        self._sliding = [group for group, window in enumerate(windows) if window]
        # With windows: of a prefix with all blocks of such a group the others are there, except where host memory was
        # short. States are there at few places of a prompt.
        self.announced = None if any(self._states) else next(iter(self._seeing_all), None)
        self._block_size = block_size

    def announced_keys(self, keys: Sequence[Key]) -> Sequence[Key]:
        return [] if self.announced is None else in_group(keys, self.announced)

    def find(
        self,
        manager: BlockManager,
        keys: Sequence[Key],
        start: int,
        limit: int,
        wait_for_writers: bool = True,
        hint: Hint | None = None,
    ) -> Match:
        """Its runs give the number of blocks in each tier and no slots: the match is loaded as a whole, and the needed
        blocks are known only when vLLM has allocated room."""
        wanted = keys[:limit]
        # A hint counts blocks of the prompt, and the lookups below are for one group each.
        anywhere = None if hint is None else hint._replace(blocks=0)
        end, awaited = self._reach(manager, wanted, start, wait_for_writers, anywhere)
        pieces: Counter[tuple[TierName, bool]] = Counter()
        for tier, slots, alone in manager.lookup(self._needed(wanted, start, end), wait_for_writers=False).runs:
            pieces[tier, alone] += len(slots)
        nearest, *slower = manager.catalogs
        left = end - start
        runs: list[Run] = []
        for tier, alone in product(reversed(slower), (True, False)):  # rather too much of a slow one than too little
            share = min(left, -(-(end - start) * pieces[tier, alone] // max(1, pieces.total())))
            runs.append(Run(tier, [-1] * share, alone))
            left -= share
        runs.append(Run(nearest, [-1] * left))
        found = [run for run in reversed(runs) if run.slots]
        return Match(start, found, awaited is not None, wanted, awaited=awaited)

    def _reach(
        self, manager: BlockManager, keys: Sequence[Key], start: int, wait_for_writers: bool, hint: Hint | None
    ) -> tuple[int, Key | None]:
        """(end of the longest prefix for which every group has its blocks, something that a longer one lacks and
        that is being written right now)"""
        end, before, awaited = len(keys), -1, None
        groups = [*self._seeing_all, *self._sliding]
        while end != before:
            before = end
            for group in groups:
                # Without a block no prefix ends behind it, until a window has passed over it.
                first = max(start, self._first(group, end * self._block_size))
                end, writing = _run(manager, keys, group, first, end, wait_for_writers, hint)
                awaited = awaited or writing
            groups = self._sliding  # a group that sees all tokens also has all blocks of a shorter prefix
        return end, awaited

    def _first(self, group: int, tokens: int) -> int:
        """The first block that a group's layers see from the token behind so many."""
        window = self._windows[group]
        return max(0, tokens - window + 1) // self._block_size if window else 0

    def _needed(self, keys: Sequence[Key], start: int, end: int) -> list[Key]:
        """For a prefix that ends here and whose beginning the engine has."""
        needed: list[Key] = []
        for group in range(len(self._windows)):
            needed += in_group(keys[max(start, self._first(group, end * self._block_size)) : end], group)
        return needed

    def place(self, manager: BlockManager, match: Match, tables: Tables, count: int) -> tuple[Match, Sequence[int]]:
        """The blocks for all positions that vLLM has allocated, needed or not: vLLM treats all of them as computed."""
        end = match.start + count
        wanted, blocks = self._pieces(match.keys, tables, [match.start] * len(tables), end)
        return manager.lookup(wanted, wait_for_writers=False), blocks

    def _pieces(
        self, keys: Sequence[Key], tables: Tables, firsts: Sequence[int], end: int
    ) -> tuple[list[Key], list[int]]:
        """Keys and engine blocks of a prompt in each group, each from its own first block on."""
        there: list[Key] = []
        places: list[int] = []
        for group, (table, first) in enumerate(zip(tables, firsts, strict=True)):
            blocks = table[first:end]
            if len(blocks) < end - first:
                raise ValueError(f"vLLM has {len(table)} blocks in a table of which it should have {end}")
            there += in_group(list(compress(keys[first:end], blocks)), group)
            places += filter(None, blocks)
        return there, places

    def targets(self, tables: Tables, start: int, count: int) -> Sequence[int]:
        return [block for table in tables for block in table[start : start + count] if block]

    def completed(
        self, keys: Sequence[Key], tables: Tables, first: int, end: int, computed: int, offers: Sequence[Offer] = ()
    ) -> tuple[Sequence[Key], Sequence[int]]:
        """Without the blocks that vLLM had freed before the step: another request may own them. Of states only those
        offered: a table also has blocks whose state is that of some token within them, and goes on changing."""
        firsts = [
            end if is_state else max(first, self._first(group, computed)) for group, is_state in enumerate(self._states)
        ]
        there, places = self._pieces(keys, tables, firsts, end)
        for group, block, tokens in offers:
            at = tokens // self._block_size - 1
            if 0 <= at < end and tokens % self._block_size == 0 and self._states[group]:
                there += in_group([keys[at]], group)
                places.append(block)
        return there, places

    def found_states(self, tables: Tables, computed: int) -> list[Offer]:
        at, within = divmod(computed, self._block_size)
        if not at or within:
            return []
        groups = (group for group, is_state in enumerate(self._states) if is_state and len(tables[group]) >= at)
        return [Offer(group, block, computed) for group in groups if (block := tables[group][at - 1])]

    def used(self, keys: Sequence[Key], blocks: int) -> Sequence[Key]:
        """Blocks behind a window keep their age: only a request that branches off there uses them."""
        return self._needed(keys, 0, blocks)

    def moved(self, blocks: int) -> int:
        tokens = blocks * self._block_size
        return sum(blocks - self._first(group, tokens) for group in range(len(self._windows)))


def _run(
    manager: BlockManager,
    keys: Sequence[Key],
    group: int,
    first: int,
    end: int,
    wait_for_writers: bool,
    hint: Hint | None,
) -> tuple[int, Key | None]:
    """(where the blocks end that a group has from the first on, the next one if it is being written)"""
    portion = 16  # most prompts are new: look up a few blocks first, not thousands
    while first < end:
        asked = in_group(keys[first : min(end, first + portion)], group)
        found = manager.lookup(asked, wait_for_writers=wait_for_writers, hint=hint)
        first += found.blocks
        if found.blocks < len(asked):
            return first, asked[found.blocks] if found.pending else None
        portion *= 8
    return end, None
