"""Keeps the conversations that will go on."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from kvbm.core.keys import Key
from kvbm.core.policy.base import Clock, EvictionPolicy, Slots, Turn
from kvbm.core.policy.classes import (
    LOOSE,
    OVERTAKEN,
    is_shared,
    level_of,
    level_said,
    of_last,
    of_private,
    of_rest,
    of_shared,
)
from kvbm.core.policy.group import Group
from kvbm.core.policy.lru import LRU
from kvbm.core.policy.returns import BUCKETS, Returns, bucket_of, end_of

_NONE = -1
_MAX_RUN = 32  # blocks that are evicted from one group before the values are compared again
_TABLE_TURNS = 12  # turns between two tables of values, of one family each
_MIN_GHOSTS = 4096
_RUNNING_SECONDS = 60.0
_MAX_AWAITED = 16384
_AGING_SECONDS = 1.0


class SessionAware(EvictionPolicy):
    def __init__(self, size: int, clock: Clock) -> None:
        self._clock = clock
        self._open = LRU(size)  # blocks of running requests, and those of which no turn has told
        self._used_at = array("d", [0.0]) * size
        self._all_used_at = np.frombuffer(self._used_at, np.float64)
        self._group = array("i", [_NONE]) * size
        self._all_group = np.frombuffer(self._group, np.int32)
        self._at = array("i", [0]) * size  # place in its group
        self._all_at = np.frombuffer(self._at, np.int32)
        self._idle = bytearray(size)  # 1: in its group and evictable
        self._all_idle = np.frombuffer(self._idle, np.uint8)
        self._turned = bytearray(size)  # 1: a turn ended while the slot was pinned
        self._all_turned = np.frombuffer(self._turned, np.uint8)
        self._idle_count = 0
        self._groups: list[Group] = []
        self._unused: list[Group] = []
        self._returns = Returns()
        self._values = self._returns.values.ravel()  # the same memory; one for each cell
        self._cells: defaultdict[int, deque[tuple[int, Group]]] = defaultdict(deque)
        self._ghost_cells: defaultdict[int, deque[tuple[int, Group]]] = defaultdict(deque)
        self._rank = np.full(self._values.size, np.inf)
        self._ghosts: dict[Key, Group] = {}
        self._ghost_order: deque[tuple[int, Group]] = deque()
        self._stalled: dict[int, Group] = {}
        self._awaited: dict[Key, tuple[int, Group, Group | None]] = {}
        self._victim: Group | None = None
        self._victim_left = 0
        self._loose_left, self._loose_time = 0, 0.0
        self._turns = 0
        self._aged_at = clock()

    # -- what the pool tells ------------------------------------------------------------------------------------------

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        self._open.inserted(slots, keys)
        self._all_used_at[slots] = self._clock()
        if self._awaited:
            for slot, key in zip(slots, keys, strict=True):
                version, group, parent = self._awaited.pop(key, (0, None, None))
                if group is not None and group.version == version:
                    self._join(int(slot), group, parent)

    def hit(self, slots: Slots) -> None:
        some = np.asarray(slots, np.int32)
        self._busy(some[self._all_idle[some] == 1])
        self._open.hit(slots)
        self._all_used_at[some] = self._clock()

    def _busy(self, slots: np.ndarray) -> None:
        self._all_idle[slots] = 0
        self._idle_count -= len(slots)

    def pinned(self, slots: Slots) -> None:
        some = np.asarray(slots, np.int32)
        idle = self._all_idle[some] == 1
        mine = some[idle]
        if len(np.unique(mine)) < len(mine):
            raise KeyError("a slot that is named twice")
        self._open.pinned(some[~idle])
        self._busy(mine)

    def released(self, slots: Slots, used: bool) -> None:
        some = np.asarray(slots, np.int32)
        back = self._all_group[some] != _NONE
        if used:
            back &= self._all_turned[some] == 1
        self._all_turned[some] = 0
        if used:
            self._open.hit(some[~back])
            self._all_used_at[some] = self._clock()
        else:
            self._open.released(some[~back], used=False)
        for slot in some[back].tolist():
            if not self._idle[slot]:
                self._idle[slot] = 1
                self._idle_count += 1
                group = self._groups[self._group[slot]]
                group.end = max(group.end, self._at[slot] + 1)
                if not group.placed:
                    self._place(group)

    def dropped(self, slots: Slots) -> None:
        self.pinned(slots)
        for slot in slots:
            self._leave(int(slot))

    def evict(self) -> int:
        if self._victim is not None:
            slot = self._pop(self._victim) if self._victim_left else _NONE
            if slot != _NONE:
                self._victim_left -= 1
                return slot
            self._victim = None
        elif self._loose_left and len(self._open):
            slot = self._open.oldest()
            if self._used_at[slot] == self._loose_time:  # used with the one before it
                self._loose_left -= 1
                self._open.evict()
                self._leave(slot)
                return slot
        self._loose_left = 0
        now = self._clock()
        self._advance(now)
        loose = np.inf
        if len(self._open) and (age := now - self._used_at[self._open.oldest()]) >= _RUNNING_SECONDS:
            loose = self._values[self._returns.rows[LOOSE] * BUCKETS + bucket_of(age)]
        while True:
            cell = int(self._rank.argmin())
            value = self._rank[cell]
            if value == np.inf and self._stalled and loose == np.inf and (slot := self._pop_stalled()) != _NONE:
                return slot
            if loose <= value:
                slot = self._open.evict()
                self._loose_left, self._loose_time = _MAX_RUN, self._used_at[slot]
                self._leave(slot)
                return slot
            queue = self._cells[cell]
            while queue and queue[0][0] != queue[0][1].version:
                queue.popleft()
            if not queue:
                self._rank[cell] = np.inf
                continue
            group = queue[0][1]
            if not group.children and (slot := self._pop(group)) != _NONE:
                self._victim, self._victim_left = group, _MAX_RUN
                return slot
            # Its blocks go after those that are worth nothing without them, or are in use.
            self._unplace(group)
            self._stalled[group.id] = group

    def _pop_stalled(self) -> int:
        for group in list(self._stalled.values()):
            if (slot := self._pop(group)) != _NONE:
                return slot
            self._stalled.pop(group.id, None)
        return _NONE

    def _pop(self, group: Group) -> int:
        """Evict the last block of a group that may be evicted; -1: there is none."""
        slots, owner, at, idle, end = group.slots, self._group, self._at, self._idle, group.end
        while end:
            end -= 1
            slot = slots[end]
            if idle[slot] and owner[slot] == group.id and at[slot] == end:
                group.end = end
                idle[slot] = 0
                self._idle_count -= 1
                self._leave(slot)
                return slot
        group.end = 0
        return _NONE

    def _leave(self, slot: int) -> None:
        """The block in this slot is gone."""
        self._turned[slot] = 0
        if (number := self._group[slot]) != _NONE:
            self._group[slot] = _NONE
            group = self._groups[number]
            group.live -= 1
            if not group.live:
                self._bury(group)

    def __len__(self) -> int:
        return len(self._open) + self._idle_count

    def __contains__(self, slot: object) -> bool:
        return slot in self._open or (isinstance(slot, int) and 0 <= slot < len(self._idle) and self._idle[slot] == 1)

    # -- turns --------------------------------------------------------------------------------------------------------

    def turned(self, keys: Sequence[Key], slots: np.ndarray, turn: Turn) -> None:
        if not len(keys):
            return
        now = self._clock()
        self._advance(now)
        self._turns += 1
        if self._turns % _TABLE_TURNS == 0:
            self._returns.update()
            self._rank = np.where(self._rank < np.inf, self._values, np.inf)
        path = self._path(keys, slots)
        parent, shared_end, number = None, 0, 1
        shared = self._shared(path)
        for i, (group, start, stop) in enumerate(path):
            self._age(group, now)
            self._returns.returned[group.kind * BUCKETS + group.bucket] += 1
            if i <= shared:
                if not group.live:
                    self._forget(group)
                    continue
                if stop - start < group.live:
                    group = self._split(group, slots[start:stop])
                group.touches += 1
                group.kind = of_shared(level_of(group.kind), group.touches)
                self._touch(group, now, parent)
                parent, shared_end, number = group, stop, 1
            else:
                number = group.turn + 1
                self._forget(group)
        end = len(keys)
        new = end - max(turn.found, shared_end)
        level = level_said(turn, shared_end)
        if shared_end < end - 1:
            parent = self._make(
                keys,
                slots,
                shared_end,
                end - 1,
                of_private(level, number, new, turn.output_tokens),
                number,
                now,
                parent,
            )
            shared_end = end - 1
        if shared_end < end:
            last = self._make(keys, slots, shared_end, end, of_last(level, number), number, now, parent)
            if parent is not None and last.live:
                parent.last = last

    def _path(self, keys: Sequence[Key], slots: np.ndarray) -> list[tuple[Group, int, int]]:
        """The groups that a request has come back to, each with the range of its blocks in the request."""
        was = np.where(slots >= 0, self._all_group[slots], _NONE)
        if self._ghosts:
            for i, ghost in enumerate(map(self._ghosts.get, keys)):
                if ghost is not None and was[i] == _NONE:
                    was[i] = ghost.id
        breaks = (np.flatnonzero(was[1:] != was[:-1]) + 1).tolist()
        path: dict[int, tuple[Group, int, int]] = {}
        for start, stop in zip([0, *breaks], [*breaks, len(was)], strict=True):
            number = int(was[start])
            if number != _NONE and number not in path:
                path[number] = self._groups[number], start, stop
        return list(path.values())

    def _shared(self, path: list[tuple[Group, int, int]]) -> int:
        """Place in the path of the last group that other conversations use too; -1: there is none."""
        for i in range(len(path) - 1, -1, -1):
            group, start, stop = path[i]
            if not group.live:
                continue
            after = path[i + 1][0] if i + 1 < len(path) else None
            if group.last is not None and group.last is not after:
                self._overtake(group.last)
            others = group.children - (after is not None and after.parent is group)
            if others or is_shared(group.kind) or stop - start < group.live:
                return i
        return -1

    def _overtake(self, last: Group) -> None:
        """The conversation has gone on without this block: it was not full, or the answer was made anew."""
        self._age(last, self._clock())
        self._orphan(last)
        last.kind = OVERTAKEN.first
        self._place(last)

    def _split(self, group: Group, slots: np.ndarray) -> Group:
        """The request has used the front of a group only: that becomes a group of its own."""
        front = self._new_group()
        front.head, front.kind, front.turn, front.touches = group.head, group.kind, group.turn, group.touches
        front.parent, group.parent = group.parent, front
        front.children = 1
        self._own(front, slots)
        group.live -= front.live
        group.head = None
        group.kind = of_rest(level_of(group.kind), group.live > front.live)
        if group.placed:
            self._place(group)
        return front

    def _make(
        self, keys: Sequence[Key], slots: np.ndarray, start: int, stop: int, kind: int, turn: int, now: float,
        parent: Group | None
    ) -> Group:  # fmt: skip
        group = self._new_group()
        group.head, group.kind, group.turn = keys[start], kind, turn
        self._own(group, slots[start:stop])
        self._touch(group, now, parent)
        if not group.live:
            self._bury(group)
            if self._ghosts.get(keys[start]) is not group:
                return group  # another group with this head is remembered
        if group.live < stop - start:
            for key in (keys[i] for i in range(start, stop) if slots[i] < 0):
                self._awaited[key] = group.version, group, parent
            while len(self._awaited) > _MAX_AWAITED:
                del self._awaited[next(iter(self._awaited))]
        return group

    def _own(self, group: Group, slots: np.ndarray) -> None:
        """These blocks, the front first, are the group's from now on."""
        some = slots[slots >= 0]
        group.slots = array("i", some.tobytes())
        group.live = len(some)
        self._all_group[some] = group.id
        self._all_at[some] = np.arange(len(some), dtype=np.int32)

    def _touch(self, group: Group, now: float, parent: Group | None) -> None:
        """A turn has used every block of the group."""
        if group.parent is not parent:
            self._orphan(group)
            if parent is not None and group.live:
                group.parent = parent
                parent.children += 1
        group.time, group.bucket = now, 0
        self._returns.exposed[group.kind * BUCKETS] += 1
        some = np.frombuffer(group.slots, np.int32)
        some = some[self._all_group[some] == group.id]
        opened = some[self._open.contains(some)]
        self._open.dropped(opened[::-1])
        self._all_idle[opened] = 1
        self._idle_count += len(opened)
        self._all_turned[some] = self._all_idle[some] == 0
        group.end = len(group.slots)
        self._place(group)

    def _join(self, slot: int, group: Group, parent: Group | None) -> None:
        """A block that was still being written when its turn ended."""
        if not group.live:
            self._ghosts.pop(group.head, None)  # type: ignore[arg-type]
            group.end = 0
            group.slots = array("i")
            if parent is not None and parent.live and parent.time == group.time:
                group.parent = parent
                parent.children += 1
        self._open.dropped((slot,))
        self._group[slot], self._at[slot] = group.id, len(group.slots)
        group.slots.append(slot)
        group.live += 1
        self._idle[slot] = 1
        self._idle_count += 1
        group.end = len(group.slots)
        if not group.placed:
            self._place(group)

    # -- groups -------------------------------------------------------------------------------------------------------

    def _new_group(self) -> Group:
        if self._unused:
            group = self._unused.pop()
            group.clear()
            return group
        group = Group(len(self._groups))
        self._groups.append(group)
        return group

    def _forget(self, group: Group) -> None:
        """The group has no block any more: other groups have its blocks, or it is a ghost."""
        if group.head is not None and self._ghosts.get(group.head) is group:
            del self._ghosts[group.head]
        self._unplace(group)
        self._orphan(group)
        group.live = 0
        group.last = None
        self._unused.append(group)

    def _orphan(self, group: Group) -> None:
        parent, group.parent = group.parent, None
        if parent is None:
            return
        if parent.last is group:
            parent.last = None
        parent.children -= 1
        if not parent.children and parent.id in self._stalled:
            self._place(parent)

    def _unplace(self, group: Group) -> None:
        group.version += 1
        group.placed = False
        self._stalled.pop(group.id, None)

    def _place(self, group: Group) -> None:
        """Make the group a candidate for eviction, by its class and age."""
        self._unplace(group)
        self._age(group, self._clock())
        group.placed = True
        cell = self._cell_of(group)
        self._cells[cell].append((group.version, group))
        self._rank[cell] = self._values[cell]

    def _cell_of(self, group: Group) -> int:
        return self._returns.rows[group.kind] * BUCKETS + group.bucket

    def _age(self, group: Group, now: float) -> None:
        bucket = bucket_of(now - group.time)
        if bucket > group.bucket:
            first = group.kind * BUCKETS + 1
            for cell in range(first + group.bucket, first + bucket):
                self._returns.exposed[cell] += 1
            group.bucket = bucket

    def _bury(self, group: Group) -> None:
        """The last block is gone: remember the group for a while, to learn whether it would have been used again."""
        self._unplace(group)
        self._orphan(group)
        if group.head is None or group.head in self._ghosts or group.kind == OVERTAKEN.first:
            self._forget(group)
            return
        self._ghosts[group.head] = group
        entry = (group.version, group)
        self._ghost_order.append(entry)
        self._ghost_cells[self._cell_of(group)].append(entry)
        limit = _MIN_GHOSTS + 4 * (len(self._groups) - len(self._unused) - len(self._ghosts))
        while len(self._ghost_order) > limit:
            version, old = self._ghost_order.popleft()
            if old.version == version:
                self._forget(old)

    def _advance(self, now: float) -> None:
        """Move the groups on that have grown older than their buckets."""
        if now - self._aged_at < _AGING_SECONDS:
            return
        self._aged_at = now
        for cell in np.flatnonzero(self._rank < np.inf)[::-1].tolist():
            queue = self._cells[cell]
            for entry in self._due(cell, queue, now):
                to = self._cell_of(entry[1])
                self._cells[to].append(entry)
                self._rank[to] = self._values[to]
            if not queue:
                self._rank[cell] = np.inf
        for cell in sorted(self._ghost_cells, reverse=True):
            queue = self._ghost_cells[cell]
            for entry in self._due(cell, queue, now):
                self._ghost_cells[self._cell_of(entry[1])].append(entry)
            if not queue:
                del self._ghost_cells[cell]

    def _due(self, cell: int, queue: deque[tuple[int, Group]], now: float) -> list[tuple[int, Group]]:
        """Take the groups from the front of a queue that have outgrown its bucket."""
        latest = now - end_of(cell % BUCKETS)
        due = []
        while queue:
            version, group = queue[0]
            if version == group.version:
                if group.time > latest:
                    break
                self._age(group, now)
                due.append((version, group))
            queue.popleft()
        return due
