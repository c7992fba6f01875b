"""The leader's catalog of the toy tier: a set of keys that are known to be there, filled by answers of the server."""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue

from kvbm.core.catalog import PENDING
from kvbm.core.pool import Pool

LOOKUP_SECONDS = 0.2  # that a lookup may wait for an answer
IS_REMOTE = False  # lookups begin when a request arrives
MAX_UNANSWERED = 3  # lookups in a row; after that the server has to answer before a lookup waits again


class ToyCatalog(Pool):
    """Places are handles of known keys. To evict one is to forget that the server has the block: ask again."""

    takes_hints = True

    def __init__(self, size, server=None, ranks=1) -> None:
        super().__init__(size)
        self.is_remote = IS_REMOTE
        self._server, self._ranks = server, ranks
        self._answers: SimpleQueue = SimpleQueue()
        self._asked: dict[bytes, float] = {}  # -> when a lookup stops to wait
        self._absent: set[bytes] = set()  # as the server has said, or because the block was bad
        self._unanswered = 0
        self._may_ask = server is not None

    def expect(self, keys, start=0, hint=None) -> None:
        self._hear()
        if hint is not None and self._server is not None:
            self._server.hints.append([hint.address, hint.blocks, hint.introduces, start])
        if not self._may_ask:
            return
        passed = (self._asked, self._absent)
        unknown = [key for key in keys[start:] if not self.holds(key) and not any(key in keys for keys in passed)]
        if unknown:
            self._asked.update(dict.fromkeys(unknown, time.monotonic() + LOOKUP_SECONDS))
            self._server.ask(unknown, self._ranks, self._answers)

    def find(self, key):
        place = super().find(key)
        if place is None and key in self._asked:
            if self._unanswered >= MAX_UNANSWERED:
                return None
            if time.monotonic() < self._asked[key]:
                self._server.pending_lookups += 1
                return PENDING
            self._unanswered += 1
        return place

    def _hear(self) -> None:
        """Take in the answers that have come, in the leader's thread."""
        present = []
        while True:
            try:
                key, found = self._answers.get_nowait()
            except Empty:
                break
            self._unanswered = 0
            self._asked.pop(key, None)
            if self.holds(key) or key in self._absent or not self._may_ask:
                continue  # this engine has written it meanwhile, or has found out that it is bad
            if found:
                present.append(key)
            else:
                self._absent.add(key)
        present = present[: self.available]  # the first of them: a prefix is worth nothing without its front
        if present and (places := self.reserve(present)) is not None:
            self.commit(places)

    def commit(self, slots, journaled=True) -> None:
        self._absent.difference_update(map(self.key_of, slots))
        super().commit(slots, journaled)

    def drop(self, keys) -> int:
        keys = list(keys)
        self._absent.update(keys)  # never found again until they are written anew
        return super().drop(keys)

    def clear(self) -> int:
        self._may_ask = False
        self._asked.clear()
        return super().clear()
