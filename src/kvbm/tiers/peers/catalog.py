"""The leader's half of the peer tier: finds blocks that peers hold, and publishes this engine's own to them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvbm.core.catalog import PENDING, Catalog, Hint, ReadOnlyCatalog, ServedState, SourceState
from kvbm.core.keys import Key
from kvbm.core.pool import Pool
from kvbm.tiers.peers.launch import ServerProcess
from kvbm.tiers.peers.lookup import MAX_KEYS, Lookup
from kvbm.tiers.peers.serving import served
from kvbm.tiers.remote_catalog import RemoteCatalog

logger = logging.getLogger("kvbm")

_END_SECONDS = 1.0


class PeerCatalog(RemoteCatalog, ReadOnlyCatalog):
    """Its blocks are others' to keep: none is written here, none announced, and a pin keeps only its place."""

    size = 0  # the peers decide

    takes_hints = True
    max_bad_keys = MAX_KEYS
    bad_seconds = max_bad_seconds = 5.0  # another peer may have the block

    def __init__(self, lookup: Lookup, server: ServerProcess) -> None:
        super().__init__()
        self._lookup = lookup
        self._server = server

    def attach(self, near: Catalog) -> None:
        assert isinstance(near, Pool)
        self._lookup.break_even = lambda: 0.0 if self.break_even is None else self.break_even()
        near.mirror = self._server.board
        self._server.start(near.findable)

    def sources(self) -> Sequence[SourceState]:
        return self._lookup.states()

    def served(self) -> ServedState:
        return served(self._server.board)

    # -- finding ------------------------------------------------------------------------------------------------------

    def expect(self, keys: Sequence[Key], start: int = 0, hint: Hint | None = None) -> None:
        if not self._is_reset:
            self._lookup.expect(keys, start, hint)

    def find(self, key: Key) -> int | None:
        if self._is_reset or self._is_bad(key):
            return None
        place = self._lookup.find(key)
        if place is not None and place != PENDING and place not in self._pins:
            self._keys[place] = key
            while len(self._keys) > 2 * MAX_KEYS:
                self._keys.pop(next(each for each in self._keys if each not in self._pins))
        return place

    def answer_seconds(self, key: Key) -> float | None:
        return None if self._is_reset else self._lookup.answer_seconds(key)

    def _forget_place(self, place: int) -> None:
        self._keys.pop(place, None)

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def drop(self, keys: Iterable[Key]) -> int:
        gone = list(dict.fromkeys(keys))
        self._mark_bad(gone)
        self._lookup.discard(gone)
        self.changes += 1
        return len(gone)

    def clear(self) -> int:
        """The weights have changed, or a rank is gone: this engine's blocks are no longer those of its fingerprint, nor
        are the peers' blocks its own."""
        if not self._is_reset:
            logger.warning("peers: not used any more by this engine, because its cache was reset")
        self._is_reset = True
        self._server.board.retire()
        self._lookup.clear()
        self.changes += 1
        return 0

    def close(self, timeout: float | None = None) -> None:
        super().close(timeout)
        seconds = _END_SECONDS if timeout is None else timeout
        self._lookup.close(seconds)
        self._server.close(seconds)
