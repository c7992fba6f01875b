"""Two policies of the literature that tell blocks used once from blocks used again: ARC and S3-FIFO.

A request counts as one use of a block, however often the pool says that it uses it: uses are counted when its turn
ends, for the blocks that it found.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvbm.core.keys import Key
from kvbm.core.policy.base import EvictionPolicy, Slots, Turn
from kvbm.core.policy.lru import LRU


class _Ghosts:
    """Blocks that were evicted, the oldest first, by Python's hash of their keys."""

    def __init__(self) -> None:
        self._names: OrderedDict[int, None] = OrderedDict()

    def add(self, name: int, limit: int) -> None:
        self._names[name] = None
        self.shrink(limit)

    def shrink(self, limit: int) -> None:
        while len(self._names) > max(limit, 0):
            self._names.popitem(last=False)

    def take(self, name: int) -> bool:
        """Whether the block was here; it no longer is."""
        return bool(self._names) and self._names.pop(name, 0) is None

    def __len__(self) -> int:
        return len(self._names)


class _TwoQueues(EvictionPolicy):
    """Blocks used once (``_once``) and blocks used again (``_again``), each in an order of its own."""

    _moves_on_hit = True  # False: a use does not change the order

    def __init__(self, size: int) -> None:
        self._size = size
        self._once, self._again = LRU(size), LRU(size)
        self._in_again = np.zeros(size, bool)
        self._names = array("q", [0]) * size
        self._all_names = np.frombuffer(self._names, np.int64)

    @abstractmethod
    def _is_known(self, name: int) -> bool:
        """Whether a block that comes in was evicted lately: it has been used before then."""

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        some = np.asarray(slots, np.intp)
        names = list(map(hash, keys))
        self._all_names[some] = names
        self._in_again[some] = [self._is_known(name) for name in names]
        self._each(some, "inserted", keys)

    def _each(self, slots: np.ndarray, call: str, *arguments: object) -> None:
        again = self._in_again[slots]
        getattr(self._once, call)(slots[~again], *arguments)
        getattr(self._again, call)(slots[again], *arguments)

    def hit(self, slots: Slots) -> None:
        if self._moves_on_hit:
            self._each(np.asarray(slots, np.intp), "hit")

    def pinned(self, slots: Slots) -> None:
        some = np.asarray(slots, np.intp)
        if not (self._once.contains(some) | self._again.contains(some)).all():
            raise KeyError("a slot that is not there")
        if len(np.unique(some)) < len(some):
            raise KeyError("a slot that is named twice")
        self._each(some, "pinned")

    def released(self, slots: Slots, used: bool) -> None:
        self._each(np.asarray(slots, np.intp), "released", used and self._moves_on_hit)

    def dropped(self, slots: Slots) -> None:
        self.pinned(slots)

    def _used_again(self, slots: np.ndarray) -> None:
        """Move blocks over to those used again; a pinned one returns there."""
        some = np.unique(slots[~self._in_again[slots]])[::-1] if len(slots) else slots
        self._in_again[some] = True
        idle = some[self._once.contains(some)]
        self._once.dropped(idle)
        self._again.hit(idle)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, slot: object) -> bool:
        return slot in self._once or slot in self._again


class ARC(_TwoQueues):
    """Adaptive replacement cache (Megiddo and Modha, 2003): two LRU queues; blocks that return soon after they were
    evicted from one of them make it longer."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._target = 0.0  # how long the queue of blocks used once shall be
        self._once_gone, self._again_gone = _Ghosts(), _Ghosts()

    def _is_known(self, name: int) -> bool:
        once, again = len(self._once_gone), len(self._again_gone)
        if self._once_gone.take(name):
            self._target = min(self._target + max(1.0, again / max(once, 1)), self._size)
            return True
        if self._again_gone.take(name):
            self._target = max(self._target - max(1.0, once / max(again, 1)), 0.0)
            return True
        return False

    def turned(self, keys: Sequence[Key], slots: np.ndarray, idle: np.ndarray, turn: Turn) -> None:
        self.hit(idle)
        found = slots[: max(turn.found, 0)]
        self._used_again(found[found >= 0])

    def evict(self) -> int:
        if len(self._once) and (len(self._once) > self._target or not len(self._again)):
            slot = self._once.evict()
            self._once_gone.add(self._names[slot], self._size - len(self._once))
        else:
            slot = self._again.evict()
            self._again_gone.add(self._names[slot], 2 * self._size - len(self) - len(self._once_gone))
        return slot


class S3FIFO(_TwoQueues):
    """S3-FIFO (Yang and others, 2023): a small queue that most blocks leave unused, a main queue, and a memory of the
    blocks that left the small one."""

    _moves_on_hit = False
    _MAX_USES = 3

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._small = max(1, size // 10)
        self._uses = array("b", [0]) * size
        self._all_uses = np.frombuffer(self._uses, np.int8)
        self._gone = _Ghosts()

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        self._all_uses[np.asarray(slots, np.intp)] = 0
        super().inserted(slots, keys)

    def _is_known(self, name: int) -> bool:
        return self._gone.take(name)

    def turned(self, keys: Sequence[Key], slots: np.ndarray, idle: np.ndarray, turn: Turn) -> None:
        self.hit(idle)
        found = slots[: max(turn.found, 0)]
        found = found[found >= 0]
        self._all_uses[found] = np.minimum(self._all_uses[found] + 1, self._MAX_USES)

    def evict(self) -> int:
        while True:
            if len(self._once) and (len(self._once) >= self._small or not len(self._again)):
                slot = self._once.evict()
                if not self._uses[slot]:
                    self._gone.add(self._names[slot], self._size - self._small)
                    return slot
                self._in_again[slot] = True
            else:
                slot = self._again.evict()
                if not self._uses[slot]:
                    return slot
                self._uses[slot] -= 1
            self._again.hit((slot,))
