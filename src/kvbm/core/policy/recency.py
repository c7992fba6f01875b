"""Slots in the order of their last use, by the batch."""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np

AWAY = 0  # state of a slot that is pinned, free or being written
_PASSED = -1  # the queue has passed the batch of the slot while the slot was pinned
_MIN_BATCHES = 1024
_MAX_TOGETHER = 32


class Recency:
    """A queue of batches of slots that were used together. A slot counts where it was put last, as long as its state is
    ``here``: leaving the queue takes no work. :class:`kvbm.core.policy.lru.LRU` is exact to the slot and takes 0.3 µs
    for each; a batch takes 2 µs, however many slots it has.

    ``states``: of every slot; its owner changes them.
    """

    def __init__(self, states: np.ndarray, here: int) -> None:
        self._states, self._here = states, here
        self._stamps = np.zeros(len(states), np.int64)  # of each slot: its latest batch
        self._stamp = 0
        self._batches: deque[tuple[float, int, np.ndarray]] = deque()  # when, stamp, slots: the first to go first
        self._limit = _MIN_BATCHES

    def use(self, slots: np.ndarray, now: float) -> None:
        """These slots have been used at this moment, the newest of all."""
        self._stamp += 1
        self._stamps[slots] = self._stamp
        self._batches.append((now, self._stamp, slots))
        if len(self._batches) > self._limit:
            self._forget_left()

    def restore(self, slots: np.ndarray) -> None:
        """These slots are back without a use. Where the queue has passed their batch, they go first."""
        passed = slots[self._stamps[slots] == _PASSED]
        if len(passed):
            self._stamp += 1
            self._stamps[passed] = self._stamp
            self._batches.appendleft((self._batches[0][0] if self._batches else 0.0, self._stamp, passed))

    def oldest_before(self, moment: float) -> float | None:
        """When the slots that go first were used; None when that was after the moment, or there are none. Looks at
        many batches together: all slots of most have left the queue by now."""
        while self._batches and self._batches[0][0] <= moment:
            taken = [batch for batch in islice(self._batches, _MAX_TOGETHER) if batch[0] <= moment]
            slots = np.concatenate([batch[2] for batch in taken])
            stamps = np.repeat([batch[1] for batch in taken], [len(batch[2]) for batch in taken])
            latest = self._stamps[slots] == stamps
            states = self._states[slots]
            here = np.flatnonzero(latest & (states == self._here))
            first = stamps[here[0]] if len(here) else None
            passed = latest & (states == AWAY)
            while taken and taken[0][1] != first:
                taken.pop(0)
                self._batches.popleft()
            if taken:
                passed[np.flatnonzero(stamps == first)[0] :] = False
            self._stamps[slots[passed]] = _PASSED  # they come back by restore()
            if taken:
                return taken[0][0]
        return None

    def first(self, count: int) -> list[int]:
        """Up to so many of the slots that go first, at least one, all of one batch; empty when there are none."""
        if self.oldest_before(np.inf) is None:
            return []
        _, stamp, slots = self._batches[0]
        found: list[int] = slots[(self._stamps[slots] == stamp) & (self._states[slots] == self._here)].tolist()
        return list(dict.fromkeys(found))[:count]

    def _forget_left(self) -> None:
        """Drop batches of which every slot has left the queue or moved to a later batch. Pinned slots may come back."""
        self._batches = deque(batch for batch in self._batches if self._may_count(batch[1], batch[2]))
        self._limit = 2 * len(self._batches) + _MIN_BATCHES

    def _may_count(self, stamp: int, slots: np.ndarray) -> bool:
        states = self._states[slots[self._stamps[slots] == stamp]]
        return bool(((states == self._here) | (states == AWAY)).any())
