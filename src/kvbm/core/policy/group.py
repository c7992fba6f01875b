"""Blocks of a conversation that are worth the same."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvbm.core.keys import Key

if TYPE_CHECKING:
    from kvbm.core.policy.waiting import Waiting


_NO_SLOTS = np.empty(0, np.intp)


class Group:
    """Consecutive blocks of a prefix that the same requests have used."""

    __slots__ = ("bucket", "children", "end", "expires", "head", "home", "id", "kind", "last", "live", "parent",
                 "place", "slots", "time", "touches", "turn", "version")  # fmt: skip

    def __init__(self, number: int) -> None:
        self.id = number
        self.version = 0  # goes up when entries in queues become void
        self.home: Waiting | None = None  # where it waits, and its place there
        self.place = 0
        self.clear()

    def clear(self) -> None:
        self.slots = _NO_SLOTS  # the front first, -1: not in the pool; those of another group by now stay listed
        self.end = 0  # slots behind this one are evicted, or in use
        self.live = 0  # blocks in the pool
        self.head: Key | None = None  # the first block
        self.kind = 0
        self.time = 0.0  # of the last turn
        self.bucket = 0  # of its age, as far as that has been counted; while it waits, its home knows
        self.expires = inf  # when what the caller said is void
        self.turn = 1  # of the conversation
        self.touches = 1
        self.parent: Group | None = None
        self.children = 0
        self.last: Group | None = None  # the last block of the turn that made this group
