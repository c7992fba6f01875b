"""The catalog of a tier with numbered slots.

A slot is always in exactly one state::

            reserve                commit                  pin
    FREE ------------> WRITING ------------> PUBLISHED <--------> PINNED
      ^                   |                   |                     |
      |      abandon      |   evict, drop     |        drop         v
      +-------------------+-------------------+------ last unpin  DOOMED

A slot can also be LENT: taken without a key, used as a staging buffer, and given back.

Only PUBLISHED and PINNED slots can be found. A DOOMED slot still has a reader but can no longer be found; it becomes
free when its last reader lets go.

Keys are raw bytes, slots are integers, and they lie in dicts of nothing else and in arrays: the garbage collector does
not walk through these. With one million blocks, lists and an OrderedDict in their place would add 25 ms to every full
collection.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, KeysView, Sequence
from itertools import groupby
from typing import Protocol

import numpy as np

from kvbm.core.catalog import Catalog, Journal
from kvbm.core.keys import Key
from kvbm.core.policy import COMMON, LRU, EvictionPolicy, Turn

_MAX_PASSED_OVER = 256  # slots that one reservation passes over because they are being read from outside
_ONE = np.int32(1)  # int32: a Python int takes ufunc.at's slow path


class Mirror(Protocol):
    """Follows which slot holds which block, for readers outside of the engine that look at the slots themselves."""

    def published(self, slots: Sequence[int], keys: Sequence[Key]) -> None: ...

    def withdrawn(self, slots: Sequence[int]) -> None:
        """Comes before any plan that writes to these slots."""

    def is_read(self, slot: int) -> bool:
        """Whether a reader has asked for the slot to stay for a moment."""


class Pool(Catalog):
    """Reserves, commits, finds, pins and evicts slots. Not thread-safe; never blocks; never raises when full."""

    def __init__(self, size: int, policy: EvictionPolicy | None = None, journal: Journal | None = None) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, got {size}")
        self.size = size
        self.journal = journal
        self._policy = policy if policy is not None else LRU(size)
        self._published: dict[Key, int] = {}
        self._writing: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}  # of every slot that is being written or published
        self._pins = array("i", [0]) * size
        self._all_pins = np.frombuffer(self._pins, np.int32)  # the same memory
        self._doomed: set[int] = set()
        self._hit_while_pinned: set[int] = set()
        self._lent: set[int] = set()
        self._free = array("i", range(size - 1, -1, -1))
        self.mirror: Mirror | None = None

    # -- finding ------------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[Key], start: int = 0) -> list[int]:
        """Slots of the longest run of published keys that begins at ``keys[start]``."""
        get = self._published.get
        slots: list[int] = []
        # Looks ahead in growing strides: the work stays in C for a long run, and a short one, or a start far into the
        # prompt, costs no more than the blocks it finds.
        stride = 1
        while start < len(keys):
            found = list(map(get, keys[start : start + stride]))
            if None in found:
                slots += found[: found.index(None)]  # type: ignore[arg-type]
                break
            slots += found  # type: ignore[arg-type]
            start += stride
            stride *= 2
        return slots

    def find(self, key: Key) -> int | None:
        return self._published.get(key)

    def holds(self, key: Key) -> bool:
        return key in self._published or key in self._writing

    def is_evictable(self, key: Key) -> bool:
        """True when the block is here and the next :meth:`reserve` might evict it."""
        slot = self._published.get(key)
        return slot is not None and not self._pins[slot]

    def is_writing(self, key: Key) -> bool:
        return key in self._writing

    def slot_of_writing(self, key: Key) -> int | None:
        return self._writing.get(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._published

    @property
    def findable(self) -> KeysView[Key]:
        return self._published.keys()

    @property
    def arriving(self) -> KeysView[Key]:
        return self._writing.keys()

    def key_of(self, slot: int) -> Key | None:
        return self._keys.get(slot)

    # -- writing ------------------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[Key], tenants: Sequence[int] | None = None) -> list[int] | None:
        """A slot for each key, evicting as needed; None (and nothing changed) when that many cannot be had.

        The caller fills the slots and ends with :meth:`commit` or :meth:`abandon` for every one of them. Raises
        ValueError, and changes nothing, unless the keys are distinct and none is held yet.
        """
        held = not (self._published.keys().isdisjoint(keys) and self._writing.keys().isdisjoint(keys))
        if held or len(set(keys)) < len(keys):
            raise ValueError("reserve() of a block that the pool already holds")
        if len(keys) > self.available:
            return None
        if tenants is not None and any(n > self.room_for(tenant) for tenant, n in Counter(tenants).items()):
            return None
        self._make_room(len(keys), tenants)
        slots: list[int] = []
        for key in keys:
            slot = self._free.pop()
            self._keys[slot] = key
            self._writing[key] = slot
            slots.append(slot)
        self._policy.assigned(slots, tenants)
        return slots

    def room_for(self, tenant: int) -> int:
        """How many blocks of a tenant :meth:`reserve` could take right now."""
        return len(self._free) + self._policy.room_for(tenant)

    def commit(self, slots: Sequence[int], journaled: bool = True) -> None:
        """The slots have been written on every rank: they can be found from now on.

        Later slots of the sequence become the first to be evicted: a block is worth nothing without those before it.
        ``journaled``: the next engine may find them too.
        """
        keys = list(map(self._key_at, slots))
        for key, slot in zip(keys, slots, strict=True):
            del self._writing[key]
            self._published[key] = slot
        self._policy.inserted(slots[::-1], keys[::-1])
        if self.mirror is not None:
            self.mirror.published(slots, keys)
        self._changed(keys, True)
        if journaled and keys and self.journal is not None:
            self.journal.put(list(zip(keys, slots, strict=True)))

    def abandon(self, slots: Iterable[int]) -> None:
        """The slots could not be written: they are free again, and their blocks are never found."""
        freed = list(slots)
        keys = list(map(self._key_at, freed))
        for key, slot in zip(keys, freed, strict=True):
            del self._writing[key]
            del self._keys[slot]
        self._free.extend(freed)
        self._policy.freed(freed)
        self._changed(keys, None)

    def lend(self, count: int) -> list[int]:
        """Up to ``count`` slots, as many as can be had, evicting as needed. They end with :meth:`take_back`."""
        count = min(count, self.available)
        self._make_room(count)
        slots = [self._free.pop() for _ in range(count)]
        self._lent.update(slots)
        return slots

    def take_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._lent.remove(slot)
            self._free.append(slot)

    def adopt(self, blocks: Iterable[tuple[Key, int]]) -> int:
        """Take over blocks that lie in their slots already, least recently used first; for a pool that holds nothing.

        Leaves out slots that the pool does not have, a second block in a slot and a second slot of a block. The journal
        is not told: it is where the blocks come from. Returns how many can be found now.
        """
        if len(self._free) < self.size:
            raise ValueError("adopt() is for a pool that holds nothing")
        for key, slot in list(blocks):
            if 0 <= slot < self.size and slot not in self._keys and key not in self._published:
                self._keys[slot] = key
                self._published[key] = slot
                self._policy.inserted((slot,), (key,))
        self._free = array("i", [slot for slot in range(self.size - 1, -1, -1) if slot not in self._keys])
        self._changed(list(self._published), True)
        return len(self._published)

    def _make_room(self, slots: int, tenants: Sequence[int] | None = None) -> None:
        """Evict until so many are free. ``tenants``: of the blocks that need the room."""
        lacking = slots - len(self._free)
        if lacking <= 0:
            return
        wanted = [(COMMON, lacking)]
        if tenants is not None:
            wanted = [(tenant, len(list(same))) for tenant, same in groupby(tenants[-lacking:])]
        evicted: list[int] = []
        passed_over = 0
        for tenant, count in wanted:
            end = len(evicted) + count
            while len(evicted) < end:
                run = self._policy.evict_run(end - len(evicted), tenant)
                if self.mirror is not None and passed_over < _MAX_PASSED_OVER:
                    read = [slot for slot in run if self.mirror.is_read(slot)][: _MAX_PASSED_OVER - passed_over]
                    for slot in read:
                        self._policy.inserted((slot,), (self._keys[slot],))
                    passed_over += len(read)
                    run = [slot for slot in run if slot not in read] if read else run
                evicted += run
        gone = list(map(self._keys.pop, evicted))
        for key in gone:
            del self._published[key]
        self._free.extend(evicted)
        if self.mirror is not None:
            self.mirror.withdrawn(evicted)
        self.evictions += len(gone)
        self._gone(gone)

    # -- reading ------------------------------------------------------------------------------------------------------

    def pin(self, slots: Sequence[int]) -> None:
        """Keep slots that :meth:`match` has just found from being evicted. Counted: two pins need two unpins. Raises
        KeyError, and changes nothing, for a slot whose block cannot be found."""
        if self._doomed and not self._doomed.isdisjoint(slots):
            raise KeyError("a slot whose block was dropped")
        some = np.array(slots, np.intp)
        self._policy.pinned(some[self._all_pins[some] == 0])
        np.add.at(self._all_pins, some, _ONE)

    def unpin(self, slots: Sequence[int], used: bool = True) -> None:
        """Undo one pin each; later slots go first, as in :meth:`commit`."""
        some = np.array(slots, np.intp)
        np.subtract.at(self._all_pins, some, _ONE)
        left = self._all_pins[some]
        if (left < 0).any():
            np.add.at(self._all_pins, some, _ONE)
            raise ValueError(f"slot {some[left < 0][0]} is not pinned")
        idle = some[left == 0]
        if used and len(idle) < len(some):
            # Another reader holds these. Should it release them without a use, they have been used all the same.
            self._hit_while_pinned.update(set(some[left > 0].tolist()) - self._doomed)
        if self._doomed:
            each = dict.fromkeys(idle.tolist())  # free once, however often it is named
            gone = self._doomed.intersection(each)
            self._doomed -= gone
            freed = [slot for slot in each if slot in gone]
            self._free.extend(freed)
            self._policy.freed(freed)
            idle = np.array([slot for slot in each if slot not in gone], np.intp)
        if self._hit_while_pinned:
            each = idle.tolist()
            if used:
                self._hit_while_pinned.difference_update(each)
            elif hit := self._hit_while_pinned.intersection(each):
                self._hit_while_pinned -= hit
                self._policy.released([slot for slot in reversed(each) if slot in hit], used=True)
                idle = np.array([slot for slot in each if slot not in hit], np.intp)
        self._policy.released(idle[::-1], used)

    def touch(self, keys: Iterable[Key]) -> None:
        some = np.array([slot for slot in map(self._published.get, keys) if slot is not None], np.intp)
        self._policy.hit(self._idle(some))

    def end_turn(self, keys: Sequence[Key], turn: Turn) -> None:
        get = self._published.get
        slots = np.array([get(key, -1) for key in keys], np.intp)
        self._policy.turned(keys, slots, self._idle(slots[slots >= 0]), turn)

    def tenants_of(self, places: Sequence[int]) -> Sequence[int] | None:
        return self._policy.tenants_of(places)

    def _idle(self, some: np.ndarray) -> np.ndarray:
        """Those of used slots that may be evicted, the last first; the others are noted as used."""
        unpinned = self._all_pins[some] == 0
        if not unpinned.all():
            self._hit_while_pinned.update(some[~unpinned].tolist())
        idle: np.ndarray = some[unpinned][::-1]
        return idle

    # -- forgetting ---------------------------------------------------------------------------------------------------

    def drop(self, keys: Iterable[Key]) -> int:
        gone = self._forget(keys)
        self._gone(gone)
        return len(gone)

    def _gone(self, keys: Sequence[Key]) -> None:
        """These blocks were evicted or dropped."""
        self._changed(keys, False)
        if keys and self.journal is not None:
            self.journal.remove(keys)

    def _forget(self, keys: Iterable[Key]) -> list[Key]:
        """Returns those that were published."""
        gone: list[Key] = []
        idle: list[int] = []
        withdrawn: list[int] = []
        for key in keys:
            slot = self._published.pop(key, None)
            if slot is None:
                continue
            gone.append(key)
            withdrawn.append(slot)
            del self._keys[slot]
            if self._pins[slot]:
                self._doomed.add(slot)
                self._hit_while_pinned.discard(slot)
            else:
                idle.append(slot)
        if self.mirror is not None and withdrawn:
            self.mirror.withdrawn(withdrawn)
        self._policy.dropped(idle)
        self._free.extend(idle)
        return gone

    def clear(self) -> int:
        """As :class:`Catalog` says. Slots that are being written stay their writer's."""
        gone = self._forget(list(self._published))
        self._changed(gone, False)
        return len(gone)

    def _changed(self, keys: Sequence[Key], findable: bool | None) -> None:
        if not keys:
            return
        self.changes += 1
        if self.on_change is not None:
            self.on_change(keys, findable)

    # -- counting -----------------------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def writing(self) -> int:
        return len(self._writing)

    @property
    def lent(self) -> int:
        return len(self._lent)

    @property
    def published(self) -> int:
        """Blocks that can be found."""
        return len(self._published)

    @property
    def pinned(self) -> int:
        """Slots with a reader, findable or not."""
        return len(self._published) - len(self._policy) + len(self._doomed)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._policy)

    def _key_at(self, slot: int) -> Key:
        key = self._keys.get(slot)
        if key is None:
            raise ValueError(f"slot {slot} holds no block")
        return key
