"""What subscribers have been told of each tier, and what they are still owed.

Subscribers count: Dynamo's publisher forgets a block when it has been removed as often as it was stored, and its index
ends a removal at the first block it does not know. So every change of a pool is told exactly once and in order. Changes
wait in a journal until somebody takes them. When it has grown larger than the pools are, it is cut down to the
difference between what was told and what is: it stays bounded, and nothing is lost however late anybody takes.

A block can be announced once somebody has *described* it: which tokens it holds and what comes before it. Blocks that
nobody has described yet, of a cache that a restart has found again say, are announced when a request brings them along.

Called from the scheduler's thread. A block costs few lookups and no object of its own: with 100,000 blocks coming and
going every second that decides (benchmarks/events.py). A million blocks take about 200 MB.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import groupby
from typing import Any

import msgspec

from kvbm.core.catalog import Catalog
from kvbm.core.keys import Key
from kvbm.plans import TierName

Name = bytes  # what the engine's own events call a block

# Blocks of a tier that one call takes at most: one or two milliseconds of work.
MAX_AT_ONCE = 4096
# Blocks in a run at most: as long as one of them is kept, so are the tokens of all.
MAX_IN_RUN = 64


class Run(msgspec.Struct, eq=False, gc=False):
    """Consecutive blocks of one request, described."""

    keys: tuple[Key, ...]
    names: tuple[Name, ...]  # the very same tuple where the engine calls blocks by their keys
    parent: Name | None  # of the block in front of the first one
    tokens: list[int] | bytes  # a list until it has been told; then four bytes each, which take an eighth of the memory
    # What else the engine says of them; ``each`` has an entry a block, if there is anything to say.
    about: Any = None
    each: Sequence[Any] | None = None


class Stored(msgspec.Struct, frozen=True, gc=False):
    """These blocks, each the parent of the next, can be found in the tier from now on."""

    tier: TierName
    names: Sequence[Name]
    parent: Name | None
    tokens: list[int]
    about: Any = None
    each: Sequence[Any] | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """These blocks, in no particular order, can no longer be found in the tier."""

    tier: TierName
    names: Sequence[Name]


class _Change(Enum):
    CAME = 1
    WENT = 2
    DESCRIBED = 3  # those among them that had come before anybody described them can be told now
    AGAIN = 4  # somebody has lost track: removed and stored once more


class _Book:
    """One tier's journal. What was told of the tier is what it held where the journal begins, less ``untold``."""

    __slots__ = ("arriving", "findable", "journal", "most", "pending", "tier", "untold")

    def __init__(self, tier: TierName, pool: Catalog) -> None:
        self.tier = tier
        self.findable = pool.findable
        self.arriving = pool.arriving
        self.journal: deque[tuple[_Change, Sequence[Key]]] = deque()
        self.pending = 0  # blocks in it
        self.most = 4 * pool.size + MAX_AT_ONCE
        self.untold: set[Key] = set()  # came, and nobody had described them

    def note(self, change: _Change, keys: Sequence[Key]) -> None:
        self.pending += len(keys)
        if len(keys) <= MAX_AT_ONCE:
            if keys:
                self.journal.append((change, keys))
        else:
            parts = range(0, len(keys), MAX_AT_ONCE)
            self.journal.extend((change, keys[at : at + MAX_AT_ONCE]) for at in parts)

    def take(self) -> Iterator[tuple[_Change, Sequence[Key]]]:
        left = MAX_AT_ONCE
        while self.journal and len(self.journal[0][1]) <= left:
            change, keys = self.journal.popleft()
            left -= len(keys)
            self.pending -= len(keys)
            yield change, keys

    def clear(self) -> list[Key]:
        """Tell nothing of all this. Returns the blocks that were in it."""
        keys = list(dict.fromkeys(key for _, keys in self.journal for key in keys))
        self.journal.clear()
        self.pending = 0
        return keys

    def cut(self) -> list[Key]:
        """Leave nothing in the journal but what makes a difference. Returns the blocks that were in it."""
        first: dict[Key, _Change] = {}
        for change, keys in self.journal:
            for key in keys:
                first.setdefault(key, change)
        passed = self.clear()
        told = {key for key in passed if first[key] in (_Change.WENT, _Change.AGAIN) and key not in self.untold}
        self.untold.difference_update(passed)
        self.note(_Change.WENT, [key for key in passed if key in told and key not in self.findable])
        self.note(_Change.AGAIN, [key for key in passed if key in told and key in self.findable])
        self.note(_Change.CAME, [key for key in passed if key not in told and key in self.findable])
        return passed


class Ledger:
    """Watches the pools from now on. What they hold already is owed."""

    def __init__(self, pools: Mapping[TierName, Catalog], block_size: int) -> None:
        self._block_size = block_size
        self._runs: dict[Key, Run] = {}
        self._names: dict[Key, Name] = {}  # of blocks whose name is not their key
        self._pools = pools
        self._books = [_Book(tier, pool) for tier, pool in pools.items()]
        for book, pool in zip(self._books, pools.values(), strict=True):
            book.note(_Change.CAME, list(book.findable))
            pool.on_change = partial(self._changed, book)

    def _changed(self, book: _Book, keys: Sequence[Key], findable: bool | None) -> None:
        if findable is None:
            self._forget(keys)
            return
        book.note(_Change.CAME if findable else _Change.WENT, keys)
        if book.pending > book.most:
            self._forget(book.cut())

    # -- describing ---------------------------------------------------------------------------------------------------

    def undescribed(self, keys: Sequence[Key]) -> list[tuple[int, int]]:
        """Which of the consecutive blocks ``keys`` some tier has, or is about to have, and nobody has described.

        As (first, end) of stretches that make good runs.
        """
        runs = self._runs
        views = [view for book in self._books for view in (book.arriving, book.findable)]
        if all(map(runs.__contains__, keys)):
            stretches = []
        elif runs.keys().isdisjoint(keys) and any(all(map(view.__contains__, keys)) for view in views):
            stretches = [(0, len(keys))]
        else:
            wanted = [key not in runs and any(key in view for view in views) for key in keys]
            stretches = []
            for fits, group in groupby(range(len(keys)), wanted.__getitem__):
                if fits:
                    places = list(group)
                    stretches.append((places[0], places[-1] + 1))
        return [(at, min(at + MAX_IN_RUN, end)) for first, end in stretches for at in range(first, end, MAX_IN_RUN)]

    def describe(self, run: Run) -> None:
        """The blocks are those of a stretch that :meth:`undescribed` has named."""
        runs = self._runs
        for key in run.keys:
            runs[key] = run
        if run.names is not run.keys:
            self._names.update(zip(run.keys, run.names, strict=True))
        for book in self._books:
            if not book.untold.isdisjoint(run.keys):
                book.note(_Change.DESCRIBED, run.keys)

    # -- telling ------------------------------------------------------------------------------------------------------

    @property
    def owed(self) -> bool:
        """Whether there may be something to tell."""
        return any(book.journal for book in self._books)

    def take(self) -> list[Stored | Removed]:
        """What has changed, or as much of it as should be told at once. Whoever takes it must deliver it."""
        events: list[Stored | Removed] = []
        passed: list[Key] = []
        for book in self._books:
            for change, keys in book.take():
                if change is _Change.CAME:
                    self._store(book, keys, events)
                    continue
                passed += keys
                if change is _Change.DESCRIBED:
                    keys = [key for key in keys if key in book.untold]
                    book.untold.difference_update(keys)
                else:
                    self._remove(book, keys, events)
                if change is not _Change.WENT:
                    self._store(book, keys, events)
        if passed:
            self._forget(passed)
        return events

    def _remove(self, book: _Book, keys: Sequence[Key], events: list[Stored | Removed]) -> None:
        if book.untold:
            told = [key for key in keys if key not in book.untold]
            book.untold.difference_update(keys)
            keys = told
        if keys:
            names = self._names
            events.append(Removed(book.tier, [names.get(key, key) for key in keys] if names else keys))

    def _store(self, book: _Book, keys: Sequence[Key], events: list[Stored | Removed]) -> None:
        at = 0
        while at < len(keys):
            run = self._runs.get(keys[at])
            if run is None:
                book.untold.add(keys[at])
                at += 1
                continue
            # Usually all of the run has come, in order.
            end = at + len(run.keys)
            if tuple(keys[at:end]) == run.keys:
                events.append(self._event(book.tier, run, 0, len(run.keys)))
                at = end
                continue
            first = last = run.keys.index(keys[at])
            while at + 1 < len(keys) and last + 1 < len(run.keys) and keys[at + 1] == run.keys[last + 1]:
                at, last = at + 1, last + 1
            events.append(self._event(book.tier, run, first, last + 1))
            at += 1

    def _event(self, tier: TierName, run: Run, first: int, end: int) -> Stored:
        """Blocks ``first`` to ``end`` of a run."""
        tokens = run.tokens
        if isinstance(tokens, bytes):
            tokens = array("I", tokens).tolist()
        else:
            run.tokens = array("I", tokens).tobytes()
        if end - first == len(run.keys):
            return Stored(tier, run.names, run.parent, tokens, run.about, run.each)
        part = tokens[first * self._block_size : end * self._block_size]
        each = run.each[first:end] if run.each is not None else None
        return Stored(tier, run.names[first:end], run.names[first - 1] if first else run.parent, part, run.about, each)

    def _forget(self, keys: Sequence[Key]) -> None:
        """Drop the descriptions of blocks that no tier has, nor is about to have."""
        for book in self._books:
            for view in (book.findable, book.arriving):
                if view:
                    keys = [key for key in keys if key not in view]
        if self._names:
            # What is still to be told of them goes by their names.
            owed = {key for book in self._books for _, changed in book.journal for key in changed}
            keys = [key for key in keys if key not in owed]
            for key in keys:
                self._names.pop(key, None)
        for key in keys:
            self._runs.pop(key, None)

    # -- starting over ------------------------------------------------------------------------------------------------

    def subscribers_forgot(self) -> None:
        """Every subscriber has been made to forget all it knew: all blocks are told anew."""
        for book in self._books:
            self._forget(book.clear())
            book.untold.clear()
            book.note(_Change.CAME, list(book.findable))

    def tell_again(self) -> None:
        """One subscriber has lost track, others have not: every block is removed and stored once more."""
        for book in self._books:
            book.note(_Change.AGAIN, list(book.findable))

    def withdraw(self) -> None:
        """The tiers are not to be counted on any more: subscribers shall forget them."""
        for book in self._books:
            book.note(_Change.WENT, list(book.findable))
        self.stop()

    def stop(self) -> None:
        """Hear of no more changes."""
        for pool in self._pools.values():
            pool.on_change = None
