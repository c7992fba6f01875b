"""Keeps the conversations that will go on."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np

from kvbm.core.keys import Key
from kvbm.core.policy.base import COMMON, Clock, EvictionPolicy, Slots, Turn
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
from kvbm.core.policy.returns import WIDTH, Returns, bucket_of
from kvbm.core.policy.waiting import Waiting, age

_NONE = -1
_TABLE_TURNS = 12  # turns between two tables of values, of one family each
_MIN_BATCH = 64  # slots of a group that are looked at together
_MIN_GHOSTS = 4096
_CANDIDATES = 1024  # groups of which the lowest are evicted
_RUNNING_SECONDS = 60.0
_MAX_AWAITED = 16384


class SessionAware(EvictionPolicy):
    def __init__(self, size: int, clock: Clock) -> None:
        self._clock = clock
        self._open = LRU(size)  # blocks of running requests, and those of which no turn has told
        self._used_at = np.zeros(size)
        self._group = np.full(size, _NONE, np.int32)
        self._at = np.zeros(size, np.int32)  # place in its group
        self._idle = np.zeros(size, bool)  # in its group and evictable
        self._turned = np.zeros(size, bool)  # a turn ended while the slot was pinned
        self._idle_count = 0
        self._groups: list[Group] = []
        self._unused: list[Group] = []
        self._returns = Returns()
        self._candidates = Waiting(self._returns, _CANDIDATES)
        self._ghosts: dict[Key, Group] = {}
        self._buried = Waiting(self._returns, _MIN_GHOSTS)
        self._ghost_order: deque[tuple[int, Group]] = deque()
        self._stalled: dict[int, Group] = {}
        self._awaited: dict[Key, tuple[int, Group, Group | None]] = {}
        self._turns = 0

    # -- what the pool tells ------------------------------------------------------------------------------------------

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        self._open.inserted(slots, keys)
        self._used_at[slots] = self._clock()
        if not self._awaited.keys().isdisjoint(keys):
            for slot, key in zip(slots, keys, strict=True):
                version, group, parent = self._awaited.pop(key, (0, None, None))
                if group is not None and group.version == version:
                    self._join(int(slot), group, parent)

    def hit(self, slots: Slots) -> None:
        some = np.asarray(slots, np.int32)
        self._busy(some[self._idle[some]])
        self._open.hit(slots)
        self._used_at[some] = self._clock()

    def _busy(self, slots: np.ndarray) -> None:
        self._idle[slots] = False
        self._idle_count -= len(slots)

    def pinned(self, slots: Slots) -> None:
        some = np.asarray(slots, np.int32)
        idle = self._idle[some]
        mine = some[idle]
        if len(set(mine.tolist())) < len(mine):
            raise KeyError("a slot that is named twice")
        self._open.pinned(some[~idle])
        self._busy(mine)

    def released(self, slots: Slots, used: bool) -> None:
        some = np.asarray(slots, np.int32)
        back = self._group[some] != _NONE
        if used:
            back &= self._turned[some]
        self._turned[some] = False
        if used:
            self._open.hit(some[~back])
            self._used_at[some] = self._clock()
        else:
            self._open.released(some[~back], used=False)
        some = some[back]
        some = some[~self._idle[some]]
        self._idle[some] = True
        self._idle_count += len(some)
        owners = self._group[some]
        for number in set(owners.tolist()):
            group = self._groups[number]
            group.end = max(group.end, int(self._at[some[owners == number]].max()) + 1)
            if group.home is None:
                self._place(group)

    def dropped(self, slots: Slots) -> None:
        self.pinned(slots)
        some = np.asarray(slots, np.int32)
        owners = self._group[some]
        self._turned[some] = False
        self._group[some] = _NONE
        for number, count in zip(*(each.tolist() for each in np.unique(owners, return_counts=True)), strict=True):
            if number != _NONE:
                self._shrink(self._groups[number], count)

    def _shrink(self, group: Group, blocks: int) -> None:
        """So many of its blocks are gone."""
        group.live -= blocks
        if not group.live:
            self._bury(group)

    def evict(self) -> int:
        return self.evict_run(1)[0]

    def evict_run(self, count: int, tenant: int = COMMON) -> list[int]:
        now = self._clock()
        loose = np.inf
        if len(self._open) and (idle := now - self._used_at[self._open.oldest()]) >= _RUNNING_SECONDS:
            loose = self._returns.values[self._returns.rows[LOOSE], bucket_of(idle)]
        while True:
            value, group = self._candidates.lowest(now)
            if group is None and self._stalled and loose == np.inf and (run := self._pop_stalled(count)):
                return run
            if group is None or loose <= value:
                return self._pop_loose(count)
            if not group.children and (run := self._pop(group, count)):
                return run
            # Its blocks go after those that are worth nothing without them, or are in use.
            self._unplace(group)
            self._stalled[group.id] = group

    def _pop_stalled(self, count: int) -> list[int]:
        for group in list(self._stalled.values()):
            if run := self._pop(group, count):
                return run
            self._stalled.pop(group.id, None)
        return []

    def _pop_loose(self, count: int) -> list[int]:
        """Evict blocks that were used together with the one that has gone unused for longest."""
        run = [self._open.evict()]
        while len(run) < count and len(self._open) and self._used_at[self._open.oldest()] == self._used_at[run[0]]:
            run.append(self._open.evict())
        for slot in run:
            self._turned[slot] = False
            if (number := self._group[slot]) != _NONE:
                self._group[slot] = _NONE
                self._shrink(self._groups[number], 1)
        return run

    def _pop(self, group: Group, count: int) -> list[int]:
        """Evict the last blocks of a group, as far as they may be evicted."""
        while group.end:
            start = max(0, group.end - max(count, _MIN_BATCH))
            last = np.frombuffer(group.slots, np.int32)[start : group.end]
            places = np.arange(start, group.end, dtype=np.int32)
            mine = np.flatnonzero((self._group[last] == group.id) & (self._at[last] == places) & self._idle[last])
            mine = mine[-count:]
            group.end = start + int(mine[0]) if len(mine) else start
            if len(mine):
                gone = last[mine]
                self._idle[gone] = False
                self._turned[gone] = False
                self._group[gone] = _NONE
                self._idle_count -= len(gone)
                self._shrink(group, len(gone))
                run: list[int] = gone[::-1].tolist()
                return run
        return []

    def __len__(self) -> int:
        return len(self._open) + self._idle_count

    def __contains__(self, slot: object) -> bool:
        return slot in self._open or (isinstance(slot, int) and 0 <= slot < len(self._idle) and bool(self._idle[slot]))

    # -- turns --------------------------------------------------------------------------------------------------------

    def turned(self, keys: Sequence[Key], slots: np.ndarray, idle: np.ndarray, turn: Turn) -> None:
        if len(set(keys)) < max(len(keys), 1):
            return self.hit(idle)  # nothing to learn: no prompt has a block twice
        now = self._clock()
        self._turns += 1
        if self._turns % _TABLE_TURNS == 0:
            self._candidates.look(now)
            self._buried.look(now)
            self._returns.update()
            self._candidates.forget_values()
        path = self._path(keys, slots)
        parent, shared_end, number = None, 0, 1
        shared = self._shared(path)
        for i, (group, start, stop) in enumerate(path):
            self._unplace(group)
            age(self._returns, group, now)
            self._returns.returned[group.kind * WIDTH + group.bucket] += self._returns.weight
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
        level, seconds = level_said(turn, shared_end)
        expires = now + seconds
        if shared_end < end - 1:
            kind = of_private(level, number, new, turn.output_tokens)
            parent = self._make(keys, slots, shared_end, end - 1, kind, number, now, expires, parent)
            shared_end = end - 1
        if shared_end < end:
            last = self._make(keys, slots, shared_end, end, of_last(level, number), number, now, expires, parent)
            if parent is not None and last.live:
                parent.last = last
        # Every block of the request is in a group that the turn has used, but for new ones in front of known ones.
        opened = idle[self._open.contains(idle) & (self._group[idle] != _NONE)]
        self._open.dropped(opened[::-1])
        self._idle[opened] = True
        self._idle_count += len(opened)
        some = slots[slots >= 0]
        self._turned[some] = ~self._idle[some]
        return None

    def _path(self, keys: Sequence[Key], slots: np.ndarray) -> list[tuple[Group, int, int]]:
        """The groups that a request has come back to, each with the range of its blocks in the request."""
        was = np.where(slots >= 0, self._group[slots], _NONE)
        ghosts = self._ghosts
        for i in np.flatnonzero(was == _NONE).tolist() if ghosts else ():
            if keys[i] in ghosts:
                was[i] = ghosts[keys[i]].id
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
        self._unplace(last)
        age(self._returns, last, self._clock())
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
        self._place(group)
        return front

    def _make(
        self, keys: Sequence[Key], slots: np.ndarray, start: int, stop: int, kind: int, turn: int, now: float,
        expires: float, parent: Group | None
    ) -> Group:  # fmt: skip
        group = self._new_group()
        group.head, group.kind, group.turn, group.expires = keys[start], kind, turn, expires
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
        self._group[some] = group.id
        self._at[some] = np.arange(len(some), dtype=np.int32)

    def _touch(self, group: Group, now: float, parent: Group | None) -> None:
        """A turn has used every block of the group."""
        if group.parent is not parent:
            self._orphan(group)
            if parent is not None and group.live:
                group.parent = parent
                parent.children += 1
        group.time, group.bucket = now, 0
        first = group.kind * WIDTH
        self._returns.exposed[first] += self._returns.weight
        self._returns.exposed[first + 1] -= self._returns.weight
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
        self._idle[slot] = True
        self._idle_count += 1
        group.end = len(group.slots)
        if group.home is not self._candidates:
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
        if group.home is not None:
            group.home.remove(group)
        self._stalled.pop(group.id, None)

    def _place(self, group: Group) -> None:
        """Make the group a candidate for eviction, by its class and age."""
        self._unplace(group)
        age(self._returns, group, self._clock())
        self._candidates.add(group)

    def _bury(self, group: Group) -> None:
        """The last block is gone: remember the group for a while, to learn whether it would have been used again."""
        self._unplace(group)
        self._orphan(group)
        if group.head is None or group.head in self._ghosts or group.kind == OVERTAKEN.first:
            self._forget(group)
            return
        self._ghosts[group.head] = group
        self._ghost_order.append((group.version, group))
        self._buried.add(group)
        limit = _MIN_GHOSTS + 4 * (len(self._groups) - len(self._unused) - len(self._ghosts))
        while len(self._ghost_order) > limit:
            version, old = self._ghost_order.popleft()
            if old.version == version:
                self._forget(old)
