"""Least recently used."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvbm.core.keys import Key
from kvbm.core.policy.base import EvictionPolicy, Slots

_ABSENT = -1
_MIN_BATCH = 64  # slots from which on numpy is faster than a loop
# Slots that a release without a use looks at to find its old place. Beyond them the place is approximate: a step takes
# 0.1 µs, and the leader's thread must not spend milliseconds here.
_MAX_WALK = 4096


class LRU(EvictionPolicy):
    """Evicts the block that has gone unused for longest.

    A ring of slots in two arrays of integers, closed by one element that stands for no slot::

        end <-> oldest <-> ... <-> newest <-> end

    An OrderedDict does the same no faster, takes more than 100 bytes a slot instead of 16, and every full garbage
    collection walks over it: 12 ms for one million slots. A dict would not do at all: taking from its front walks over
    every entry deleted there before, which makes a long run of evictions quadratic.

    The slots of a long prompt come and go together, so they are neighbours in the ring, in the same order: a chain of
    them leaves it by two links.

    Each slot has a stamp, which grows with every use. A slot that is released without a use returns to its place by it.
    """

    def __init__(self, size: int) -> None:
        self._end = size
        self._newer = array("i", [_ABSENT]) * (size + 1)
        self._older = array("i", [_ABSENT]) * (size + 1)
        self._newer[size] = self._older[size] = size
        self._all_newer = np.frombuffer(self._newer, np.int32)  # the same memory
        self._all_older = np.frombuffer(self._older, np.int32)
        self._stamps = array("q", [0]) * size
        self._all_stamps = np.frombuffer(self._stamps, np.int64)
        self._clock = 0
        self._count = 0

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        self.hit(slots)

    def hit(self, slots: Slots) -> None:
        if len(slots) >= _MIN_BATCH and self._add_many(np.asarray(slots, np.intp)):
            return
        stamps, clock = self._stamps, self._clock
        newer, older = self._newer, self._older
        newest = older[self._end]
        for slot in slots:
            clock += 1
            stamps[slot] = clock
            before = older[slot]
            if before == _ABSENT:
                self._count += 1
            elif slot == newest:
                continue
            else:
                after = newer[slot]
                newer[before] = after
                older[after] = before
            newer[newest] = slot
            older[slot] = newest
            newest = slot
        self._clock = clock
        # Closed once, at the end: until here the newest slot has no neighbour on that side.
        newer[newest] = self._end
        older[self._end] = newest

    def _add_many(self, slots: np.ndarray) -> bool:
        """False, and nothing has changed, when some slot is there twice: then the last place of it counts."""
        if not self._distinct(slots):
            return False
        there = slots[self._all_older[slots] != _ABSENT]
        self._unlink(there)
        before = np.concatenate(([self._older[self._end]], slots[:-1]))
        self._all_older[slots] = before
        self._all_newer[before] = slots
        newest = int(slots[-1])
        self._newer[newest] = self._end
        self._older[self._end] = newest
        self._all_stamps[slots] = np.arange(self._clock + 1, self._clock + 1 + len(slots))
        self._clock += len(slots)
        self._count += len(slots) - len(there)
        return True

    def released(self, slots: Slots, used: bool) -> None:
        if used:
            self.hit(slots)
        else:
            self._put_back(slots)

    def _put_back(self, slots: Slots) -> None:
        """Each slot before those with a newer stamp. Walks once from the newest end, for all of them."""
        newer, older, stamps = self._newer, self._older, self._stamps
        place, steps = self._end, 0  # slots are linked in on the older side of it
        for slot in sorted(set(map(int, slots)), key=stamps.__getitem__, reverse=True):
            while (before := older[place]) != self._end and stamps[before] > stamps[slot] and steps < _MAX_WALK:
                place = before
                steps += 1
            newer[before], older[slot], newer[slot], older[place] = slot, before, place, slot
            self._count += 1
            place = slot

    def pinned(self, slots: Slots) -> None:
        self._remove_all(slots)

    def dropped(self, slots: Slots) -> None:
        self._remove_all(slots)

    def _remove_all(self, slots: Slots) -> None:
        if len(slots) >= _MIN_BATCH:
            many = np.asarray(slots, np.intp)[::-1]  # in the order of the ring, where the end of a prefix is older
            if (self._all_older[many] == _ABSENT).any() or not self._distinct(many):
                raise KeyError("a slot that is not there, or is named twice")
            self._unlink(many)
            self._all_newer[many] = self._all_older[many] = _ABSENT
            self._count -= len(many)
            return
        if len(set(slots)) < len(slots) or any(self._older[slot] == _ABSENT for slot in slots):
            raise KeyError("a slot that is not there, or is named twice")
        for slot in slots:
            self._remove(slot)

    def _distinct(self, slots: np.ndarray) -> bool:
        """Whether no slot is named twice. Sorting would take longer than everything else here."""
        older, places = self._all_older, np.arange(len(slots), dtype=np.int32)
        kept = older[slots]
        older[slots] = places
        distinct = bool((older[slots] == places).all())
        older[slots] = kept
        return distinct

    def _unlink(self, slots: np.ndarray) -> None:
        """Close the ring where they were, chain by chain; they still point into it."""
        if not len(slots):
            return
        breaks = np.flatnonzero(self._all_newer[slots[:-1]] != slots[1:])
        firsts, lasts = slots[np.append(0, breaks + 1)], slots[np.append(breaks, len(slots) - 1)]
        newer, older = self._newer, self._older
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            before, after = older[first], newer[last]
            newer[before] = after
            older[after] = before

    def _remove(self, slot: int) -> None:
        before, after = self._older[slot], self._newer[slot]
        self._newer[before] = after
        self._older[after] = before
        self._newer[slot] = self._older[slot] = _ABSENT
        self._count -= 1

    def evict(self) -> int:
        slot = self._newer[self._end]
        if slot == self._end:
            raise KeyError("no slot may be evicted")
        self._remove(slot)
        return slot

    def oldest(self) -> int:
        """The slot that goes next, which must be there."""
        return self._newer[self._end]

    def contains(self, slots: np.ndarray) -> np.ndarray:
        """Which of these slots may be evicted."""
        present: np.ndarray = self._all_older[slots] != _ABSENT
        return present

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and 0 <= slot < self._end and self._older[slot] != _ABSENT
