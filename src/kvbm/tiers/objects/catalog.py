"""The leader's half of the object store tier.

Other engines write to the same bucket, so the catalog lists only the blocks that this engine has found or written
lately. :mod:`kvbm.tiers.objects.presence` asks the store, and every lookup brings the list up to date.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvbm.core.catalog import PENDING, Hint
from kvbm.core.keys import Key
from kvbm.tiers.objects.capacity import Keeper
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.presence import MAX_KEYS, Presence
from kvbm.tiers.remote_catalog import RemoteCatalog

logger = logging.getLogger("kvbm")

MAX_WRITING = 4096  # blocks on their way
_END_SECONDS = 1.0


class ObjectCatalog(RemoteCatalog):
    """Places say which object holds a block (:mod:`kvbm.tiers.objects.format`), so pins need not keep anything."""

    is_bounded = False  # by this engine; see the capacity module
    max_bad_keys = MAX_KEYS
    bad_seconds = 60.0  # unless the block is written anew
    max_bad_seconds = 3600.0

    def __init__(
        self, clients: Sequence[Client], presence: Presence, keeper: Keeper | None = None, block_bytes: int = 0
    ) -> None:
        """``block_bytes``: of the rank that has the most."""
        super().__init__()
        self._clients = list(dict.fromkeys(clients))
        self._presence = presence
        presence.compute_seconds = self._compute_seconds
        self._block_bytes = block_bytes
        self._keeper = keeper
        self._found: OrderedDict[Key, int] = OrderedDict()  # the last used at the end
        self._writing: dict[Key, int] = {}

    # -- finding ------------------------------------------------------------------------------------------------------

    def expect(self, keys: Sequence[Key], start: int = 0, hint: Hint | None = None) -> None:
        if not self._is_reset:
            self._presence.expect(keys, start)

    def find(self, key: Key) -> int | None:
        if self._is_suspended:
            return None  # a load would fail, and cost its request the time
        place = None if self._is_reset or self._is_bad(key) else self._presence.find(key)
        before = self._found.get(key)
        if place is None or place == PENDING:
            if before is not None:
                self._lose([key])
        elif before != place:
            if before is not None:
                self._lose([key])
            self._publish([key], [place])
        return place

    def is_alone(self, place: int) -> bool:
        return self._presence.is_alone(place)

    def _compute_seconds(self, blocks: int) -> float:
        rate = 0.0 if self.break_even is None else self.break_even()
        return blocks * self._block_bytes / rate if rate else 0.0

    def answer_seconds(self, key: Key) -> float | None:
        return None if self._is_reset or self._is_bad(key) else self._presence.answer_seconds(key)

    def holds(self, key: Key) -> bool:
        return key in self._writing or (not self._is_bad(key) and self._presence.was_there(key))

    def is_writing(self, key: Key) -> bool:
        return key in self._writing

    @property
    def findable(self) -> Collection[Key]:
        return self._found.keys()

    @property
    def arriving(self) -> Collection[Key]:
        return self._writing.keys()

    # -- writing ------------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[Key], tenants: Sequence[int] | None = None) -> list[int] | None:
        if len(keys) > self.available:
            return None
        places = self._presence.place_for_write(keys)
        for key, place in zip(keys, places, strict=True):
            self._writing[key] = place
            self._keys[place] = key
        return places

    def fitting(self, keys: Sequence[Key], room: int) -> int:
        return room if room >= len(keys) else self._presence.last_whole(keys, room)

    def commit(self, places: Sequence[int]) -> None:
        keys = self._end_writing(places)
        self._presence.add(places)
        for key in keys:
            self._bad.pop(key, None)
        if self._is_reset:
            return
        fresh = [(key, place) for key, place in zip(keys, places, strict=True) if key not in self._found]
        self._publish([key for key, _ in fresh], [place for _, place in fresh])

    def abandon(self, places: Iterable[int]) -> None:
        keys = self._end_writing(list(places))
        if keys and self.on_change is not None:
            self.on_change(keys, None)

    def _end_writing(self, places: Sequence[int]) -> list[Key]:
        keys = [self._keys[place] for place in places]
        for key, place in zip(keys, places, strict=True):
            self._writing.pop(key, None)
            self._forget_place(place)
        return keys

    # -- reading ------------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            if key in self._found:
                self._found.move_to_end(key)

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def drop(self, keys: Iterable[Key]) -> int:
        there = [key for key in dict.fromkeys(keys) if key in self._found]
        self._mark_bad(there)
        self._presence.discard([self._found[key] for key in there])
        self._lose(there)
        if there:
            self._doubt("blocks of it could not be read")
        return len(there)

    def suspect(self) -> None:
        self._doubt("a read took several times as long as usual")

    def _doubt(self, reason: str) -> None:
        for client in self._clients:
            client.doubt(reason, self._presence.probe_name)

    def clear(self) -> int:
        """The leader resets the cache because its blocks no longer fit the weights. The objects in the bucket are of
        the old weights, and other engines use them: this engine does without the tier from now on."""
        if not self._is_reset:
            logger.warning("object store: not used any more by this engine, because its cache was reset")
        self._is_reset = True
        count = len(self._found)
        self._lose(list(self._found))
        self._presence.clear()
        return count

    def close(self, timeout: float | None = None) -> None:
        super().close(timeout)
        seconds = _END_SECONDS if timeout is None else timeout
        if self._keeper is not None:
            self._keeper.close(seconds)
        self._presence.close(seconds)
        for client in self._clients:
            client.close()

    # -- counting -----------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        # Blocks that cannot be written now are passed over for good: a doubt, which mostly passes, is no reason.
        if self._is_reset or any(client.suspended and not client.is_doubted for client in self._clients):
            return 0
        return MAX_WRITING - len(self._writing)

    @property
    def _is_suspended(self) -> bool:
        return any(client.suspended for client in self._clients)

    @property
    def size(self) -> int:  # type: ignore[override]
        return len(self._found) + len(self._writing)

    @property
    def writing(self) -> int:
        return len(self._writing)

    # -- the list -----------------------------------------------------------------------------------------------------

    def _publish(self, keys: Sequence[Key], places: Sequence[int]) -> None:
        for key, place in zip(keys, places, strict=True):
            self._found[key] = place
            self._keys[place] = key
        self.changes += 1
        if keys and self.on_change is not None:
            self.on_change(keys, True)
        if len(self._found) > MAX_KEYS:
            oldest = [key for key, _ in zip(self._found, range(len(self._found) - MAX_KEYS), strict=False)]
            self.evictions += len(oldest)
            self._lose(oldest)

    def _lose(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._forget_place(self._found.pop(key))
        self.changes += 1
        if keys and self.on_change is not None:
            self.on_change(keys, False)

    def _forget_place(self, place: int) -> None:
        key = self._keys.get(place)
        if key is not None and place not in self._pins and place not in (self._writing.get(key), self._found.get(key)):
            del self._keys[place]
