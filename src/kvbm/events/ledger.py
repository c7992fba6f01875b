"""The events that subscribers have received of each tier, and those that they are still owed.

Subscribers count: Dynamo's publisher drops a block after as many removals as stores, and its index stops a removal at
the first unknown block. So the ledger announces every change of a pool exactly once and in order. Changes wait in a
journal until the adapter takes them. A journal that outgrows the pools is compacted to the difference between the
announced state and the current one, so it stays bounded and loses nothing, however late the adapter comes.

A block can be announced once it is *described*: its tokens and the block before it are known. Blocks without a
description, for example those of a cache that a restart has found again, are announced when a request names them.

All methods are called from the scheduler's thread. A block costs a few lookups and no object of its own, because up to
100,000 blocks change in a second (benchmarks/events.py). A million blocks take about 200 MB.
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

Name = bytes  # a block in the engine's own events

# Blocks of a tier in one call: one or two milliseconds of work.
MAX_AT_ONCE = 4096
# Blocks in a run: while the ledger knows one of them, it holds the tokens of all.
MAX_IN_RUN = 64


class Run(msgspec.Struct, eq=False, gc=False):
    """Consecutive blocks of one request, described."""

    keys: tuple[Key, ...]
    names: tuple[Name, ...]  # the same tuple as ``keys`` where the engine names blocks by their keys
    parent: Name | None  # the block before the first one
    tokens: list[int] | bytes  # a list until the first event; then four bytes each, an eighth of the memory
    # Further fields of the engine's events; ``each`` has one entry a block.
    about: Any = None
    each: Sequence[Any] | None = None


class Stored(msgspec.Struct, frozen=True, gc=False):
    """The tier now holds these blocks. Each is the parent of the next."""

    tier: TierName
    names: Sequence[Name]
    parent: Name | None
    tokens: list[int]
    about: Any = None
    each: Sequence[Any] | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """The tier no longer holds these blocks, which are in no particular order."""

    tier: TierName
    names: Sequence[Name]


class _Change(Enum):
    CAME = 1
    WENT = 2
    DESCRIBED = 3  # those that came without a description can be announced now
    AGAIN = 4  # a subscriber is out of sync: announce a removal and a store


class _Book:
    """One tier's journal. Subscribers know the blocks at the journal's beginning, without those in ``untold``."""

    __slots__ = ("arriving", "findable", "journal", "max_pending", "pending", "tier", "untold")

    def __init__(self, tier: TierName, pool: Catalog) -> None:
        self.tier = tier
        self.findable = pool.findable
        self.arriving = pool.arriving
        self.journal: deque[tuple[_Change, Sequence[Key]]] = deque()
        self.pending = 0  # blocks in it
        self.max_pending = 4 * pool.size + MAX_AT_ONCE
        self.untold: set[Key] = set()  # came without a description

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
        """Discard the journal. Returns the blocks that were in it."""
        keys = list(dict.fromkeys(key for _, keys in self.journal for key in keys))
        self.journal.clear()
        self.pending = 0
        return keys

    def cut(self) -> list[Key]:
        """Compact the journal to the changes that make a difference. Returns the blocks that were in it."""
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
    """Follows the pools from now on. The blocks that they already hold are owed."""

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
        if book.pending > book.max_pending:
            self._forget(book.cut())

    # -- describing ---------------------------------------------------------------------------------------------------

    def undescribed(self, request: Sequence[Key], first: int, end: int) -> list[tuple[int, int]]:
        """Those blocks of a request, from ``first`` to ``end``, that a tier holds or receives and that have no
        description, as (first, end) of stretches, each of the right length for a run."""
        runs, keys = self._runs, request[first:end]
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
        spans = [range(first + start, first + stop) for start, stop in stretches]
        return [(at, min(at + MAX_IN_RUN, span.stop)) for span in spans for at in span[::MAX_IN_RUN]]

    def describe(self, run: Run) -> None:
        """Add the description of a stretch that :meth:`undescribed` has returned."""
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
        """Whether :meth:`take` may return events."""
        return any(book.journal for book in self._books)

    def take(self) -> list[Stored | Removed]:
        """The next owed events, at most MAX_AT_ONCE blocks a tier. The caller must deliver them."""
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
            # Usually the whole run has come, in order.
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
        """Drop the descriptions of blocks that no tier holds or receives."""
        for book in self._books:
            for view in (book.findable, book.arriving):
                if view:
                    keys = [key for key in keys if key not in view]
        if self._names:
            # Owed events need the names of their blocks.
            owed = {key for book in self._books for _, changed in book.journal for key in changed}
            keys = [key for key in keys if key not in owed]
            for key in keys:
                self._names.pop(key, None)
        for key in keys:
            self._runs.pop(key, None)

    # -- starting over ------------------------------------------------------------------------------------------------

    def subscribers_forgot(self) -> None:
        """Every subscriber has dropped its state: announce all blocks again."""
        for book in self._books:
            self._forget(book.clear())
            book.untold.clear()
            book.note(_Change.CAME, list(book.findable))

    def tell_again(self) -> None:
        """One subscriber is out of sync: announce the removal and the store of every block."""
        for book in self._books:
            book.note(_Change.AGAIN, list(book.findable))

    def withdraw(self) -> None:
        """The tiers are out of use: announce the removal of every block."""
        for book in self._books:
            book.note(_Change.WENT, list(book.findable))
        self.stop()

    def stop(self) -> None:
        """Stop following the pools."""
        for pool in self._pools.values():
            pool.on_change = None
