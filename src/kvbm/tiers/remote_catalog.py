"""What the catalogs of remote tiers have in common: they list blocks that other engines may delete at any time."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvbm.core.catalog import Catalog
from kvbm.core.keys import Key


class RemoteCatalog(Catalog):
    """A pin keeps a place and its key here, and nothing at the other end: a read that comes too late fails."""

    is_remote = True
    free = 0
    max_bad_keys: int  # remembered; the oldest go first
    bad_seconds: float  # a block that could not be read is not looked for again for so long
    max_bad_seconds: float  # the same of one that never can: each failure doubles the time

    def __init__(self) -> None:
        self._keys: dict[int, Key] = {}  # of the places that this engine knows, and of those that are pinned
        self._pins: dict[int, int] = {}
        self._bad: OrderedDict[Key, tuple[float, float]] = OrderedDict()  # -> (until when, for how long)
        self._is_reset = False

    def key_of(self, place: int) -> Key | None:
        return self._keys.get(place)

    def pin(self, places: Sequence[int]) -> None:
        for place in places:
            self._pins[place] = self._pins.get(place, 0) + 1

    def unpin(self, places: Sequence[int], used: bool = True) -> None:
        for place in places:
            self._pins[place] -= 1
            if not self._pins[place]:
                del self._pins[place]
                self._forget_place(place)

    @abstractmethod
    def _forget_place(self, place: int) -> None:
        """The last pin of a place is gone: forget its key, unless the tier still needs it."""

    def _mark_bad(self, keys: Iterable[Key]) -> None:
        """These blocks could not be read: do not look for them for a while."""
        now = time.monotonic()
        for key in keys:
            _, before = self._bad.pop(key, (0.0, 0.0))
            seconds = min(2 * before or self.bad_seconds, self.max_bad_seconds)
            self._bad[key] = now + seconds, seconds
        while len(self._bad) > self.max_bad_keys:
            self._bad.popitem(last=False)

    def _is_bad(self, key: Key) -> bool:
        return key in self._bad and time.monotonic() < self._bad[key][0]

    @property
    def pinned(self) -> int:
        return len(self._pins)
