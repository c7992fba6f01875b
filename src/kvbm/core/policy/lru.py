"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvbm.core.policy.base import EvictionPolicy


class LRU(EvictionPolicy):
    """Evicts what has gone unused for longest.

    An OrderedDict, not a dict: taking from the front of a dict walks over every entry deleted there before, which turns
    a long run of evictions quadratic.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, slots: Iterable[int]) -> None:
        order = self._order
        for slot in slots:
            order[slot] = None
            order.move_to_end(slot)

    def remove(self, slot: int) -> None:
        del self._order[slot]

    def take(self) -> int:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, slot: object) -> bool:
        return slot in self._order
