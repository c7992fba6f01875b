"""Keeps the conversations that will go on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvbm.core.clock import Clock
from kvbm.core.keys import Key
from kvbm.core.policy.base import COMMON, EvictionPolicy, Slots, Turn
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
from kvbm.core.policy.recency import AWAY, Recency
from kvbm.core.policy.returns import WIDTH, Returns, bucket_of
from kvbm.core.policy.waiting import Waiting, age

_NONE = -1
# States of a slot beside AWAY.
_OPEN = 1  # evictable, in the order of use: of a running request, or of one of which no turn has told
_IDLE = 2  # evictable, with its group
_LOOK_TURNS = 12  # turns between two looks at how old groups have become
# Turns between two tables of values, of one family each: a part of all turns so far, in whole looks up to so many. A
# table takes as long as two requests of 24 blocks.
_TABLE_PART = 16
_MAX_TABLE_LOOKS = 4
_MIN_BATCH = 64  # slots of a group that are looked at together
_MIN_GHOSTS = 4096
_CANDIDATES = 1024  # groups of which the lowest are evicted
_RUNNING_SECONDS = 60.0
_OPEN_EVICTIONS = 16  # evictions between two looks for blocks of requests that seem to run for longer
_MAX_AWAITED = 16384
# The last block of a turn is a group of its own where conversations often go on without it: it was not full, or the
# answer was made anew. Elsewhere it is one in every so many turns, to notice a change.
_MIN_OVERTAKEN = 0.005
_PROBE_TURNS = 8
_OVERTAKEN_TURNS = 64  # returns over which the part is averaged


class SessionAware(EvictionPolicy):
    """Engines tell of a block many times while its request runs, and of the request once, when it ends. So the former
    takes a few operations on arrays, however many blocks there are; groups change with the latter and with evictions.
    For short requests each operation counts: bytes of a mask are searched twice as fast as numpy counts it, and an
    array of slots is of type intp: one of int32 takes six times as long as an index.
    """

    def __init__(self, size: int, clock: Clock) -> None:
        self._clock = clock
        # One entry more than slots: -1 stands for a block that the pool does not have.
        self._state = np.full(size + 1, AWAY, np.int8)
        self._group = np.full(size + 1, _NONE, np.int32)
        self._turned = np.zeros(size + 1, bool)  # a turn ended while the slot was pinned
        self._open = Recency(self._state, _OPEN)
        self._count = 0  # of evictable slots
        self._groups: list[Group] = []
        self._unused: list[Group] = []
        self._returns = Returns()
        self._candidates = Waiting(self._returns, _CANDIDATES)
        self._ghosts: dict[Key, Group] = {}
        self._buried = Waiting(self._returns, _MIN_GHOSTS)
        self._ghost_order: deque[tuple[int, Group]] = deque()
        self._stalled: dict[int, Group] = {}
        self._awaited: dict[Key, tuple[int, Group, Group | None, int]] = {}
        self._evictions = 0
        self._is_open_old = True
        self._turns = 0
        self._table_turn = 0  # of the latest table
        self._overtaken = 1.0  # part of the last blocks without which a conversation has gone on

    # -- what the pool tells ------------------------------------------------------------------------------------------

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        self._add(np.asarray(slots, np.intp), len(slots))
        if self._awaited and not self._awaited.keys().isdisjoint(keys):
            for slot, key in zip(slots, keys, strict=True):
                version, group, parent, place = self._awaited.pop(key, (0, None, None, 0))
                if group is not None and group.version == version:
                    self._join(int(slot), group, parent, place)

    def hit(self, slots: Slots) -> None:
        if len(slots):
            some = np.asarray(slots, np.intp)
            self._add(some, len(set(some[self._state[some] == AWAY].tolist())))

    def _add(self, some: np.ndarray, new: int) -> None:
        """These slots have been used. So many of them could not be evicted before."""
        self._count += new
        self._state[some] = _OPEN
        self._open.use(some, self._clock())

    def pinned(self, slots: Slots) -> None:
        if not len(slots):
            return
        some = np.asarray(slots, np.intp)
        if AWAY in self._state[some].tobytes() or len(set(some.tolist())) < len(some):
            raise KeyError("a slot that is not there, or is named twice")
        self._state[some] = AWAY
        self._count -= len(some)

    def released(self, slots: Slots, used: bool) -> None:
        if not len(slots):
            return
        some = np.asarray(slots, np.intp)
        back = self._turned[some] if used else self._group[some] != _NONE
        if True in back.tobytes():
            self._turned[some] = False
            self._return(some[back])
            some = some[~back]
            if not len(some):
                return
        new = len(set(some.tolist()))  # a slot may be named twice
        if used:
            self._add(some, new)
        else:
            self._count += new
            self._state[some] = _OPEN
            self._open.restore(some)

    def _return(self, some: np.ndarray) -> None:
        """These slots may be evicted with their groups."""
        self._count += len(set(some.tolist()))
        self._state[some] = _IDLE
        for number in set(self._group[some].tolist()):
            group = self._groups[number]
            group.end = len(group.slots)
            if group.home is None:
                self._place(group)

    def dropped(self, slots: Slots) -> None:
        self.pinned(slots)
        self.freed(slots)

    def freed(self, slots: Slots) -> None:
        if not len(slots):
            return
        some = np.asarray(slots, np.intp)
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
        self._evictions += 1
        used_at = None
        if self._is_open_old or self._evictions % _OPEN_EVICTIONS == 0:
            used_at = self._open.oldest_before(now - _RUNNING_SECONDS)
            self._is_open_old = used_at is not None
        if used_at is not None:
            loose = self._returns.values[self._returns.rows[LOOSE], bucket_of(now - used_at)]
        while True:
            value, group = self._candidates.lowest(now)
            if group is None and self._stalled and loose == np.inf and (run := self._pop_stalled(count)):
                return run
            if group is None or loose <= value:
                return self._pop_open(count)
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

    def _pop_open(self, count: int) -> list[int]:
        """Evict blocks that were used together, before all others of running requests."""
        run = self._open.first(count)
        if not run:
            raise KeyError("no slot may be evicted")
        self.dropped(run)
        return run

    def _pop(self, group: Group, count: int) -> list[int]:
        """Evict the last blocks of a group, as far as they may be evicted."""
        while group.end:
            start = max(0, group.end - max(count, _MIN_BATCH))
            last = group.slots[start : group.end]
            mine = self._state[last] == _IDLE
            if group.live < len(group.slots):
                mine &= self._group[last] == group.id
            if False not in mine.tobytes():
                gone = last[-count:]
                if group.end == len(group.slots):
                    group.slots = group.slots[: -len(gone)]
                group.end -= len(gone)
            else:
                those = mine.nonzero()[0][-count:]
                gone = last[those]
                group.end = start + int(those[0]) if len(those) else start
            if len(gone):
                self._state[gone] = AWAY
                self._group[gone] = _NONE
                self._count -= len(gone)
                self._shrink(group, len(gone))
                run: list[int] = gone[::-1].tolist()
                return run
        return []

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: object) -> bool:
        return isinstance(slot, int) and 0 <= slot < len(self._state) - 1 and bool(self._state[slot])

    # -- turns --------------------------------------------------------------------------------------------------------

    def turned(self, keys: Sequence[Key], slots: np.ndarray, idle: np.ndarray, turn: Turn) -> None:
        if len(set(keys)) < max(len(keys), 1):
            return self.hit(idle)  # nothing to learn: no prompt has a block twice
        now = self._clock()
        self._turns += 1
        if self._turns % _LOOK_TURNS == 0:
            self._look(now)
        end = len(keys)
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
        may_be_open = shared_end > 0
        new = end - max(turn.found, shared_end)
        level, seconds = level_said(turn, shared_end)
        expires = now + seconds
        self._returns.has_hints |= level > 0
        is_apart = self._overtaken > _MIN_OVERTAKEN or self._turns % _PROBE_TURNS == 0
        stop = end - is_apart
        if shared_end < stop:
            kind = of_private(level, number, new, turn.output_tokens)
            parent = self._make(keys, slots, shared_end, stop, kind, number, now, expires, parent)
            shared_end = stop
        if shared_end < end:
            last = self._make(keys, slots, shared_end, end, of_last(level, number), number, now, expires, parent)
            if parent is not None and last.live:
                parent.last = last
        # Every block of the request is in a group that the turn has used, but for new ones in front of known ones.
        if may_be_open:
            idle = idle[self._group[idle] != _NONE]
        self._state[idle] = _IDLE
        if len(idle) < end:
            some = slots[slots >= 0]
            self._turned[some] = (self._state[some] == AWAY) & (self._group[some] != _NONE)
        return None

    def _look(self, now: float) -> None:
        """Count how old groups have become, and make a new table of values now and then."""
        self._buried.look(now)
        turns = self._turns - self._table_turn
        if turns >= min(self._turns // _TABLE_PART, _MAX_TABLE_LOOKS * _LOOK_TURNS):
            self._candidates.look(now)  # evictions look at them as well
            self._returns.update(turns)
            self._candidates.forget_values()
            self._table_turn = self._turns

    def _path(self, keys: Sequence[Key], slots: np.ndarray) -> list[tuple[Group, int, int]]:
        """The groups that a request has come back to, each with the range of its blocks in the request."""
        was = self._group[slots]
        ghosts = self._ghosts
        unknown = (was == _NONE).nonzero()[0].tolist()
        if len(unknown) < len(keys) or not ghosts.keys().isdisjoint(keys):
            for i in unknown:
                if keys[i] in ghosts:
                    was[i] = ghosts[keys[i]].id
        else:
            return []
        breaks = ((was[1:] != was[:-1]).nonzero()[0] + 1).tolist()
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
            if group.last is not None:
                is_overtaken = group.last is not after
                self._overtaken += (is_overtaken - self._overtaken) / _OVERTAKEN_TURNS
                if is_overtaken:
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
            for i in (i for i in range(start, stop) if slots[i] < 0):
                self._awaited[keys[i]] = group.version, group, parent, i - start
            while len(self._awaited) > _MAX_AWAITED:
                del self._awaited[next(iter(self._awaited))]
        return group

    def _own(self, group: Group, slots: np.ndarray) -> None:
        """These blocks are the group's from now on."""
        group.slots = slots
        group.live = len(slots) - (slots < 0).tobytes().count(True)
        self._group[slots] = group.id
        self._group[_NONE] = _NONE

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
        self._candidates.add(group)

    def _join(self, slot: int, group: Group, parent: Group | None, place: int) -> None:
        """A block that was still being written when its turn ended."""
        if not group.live:
            self._ghosts.pop(group.head, None)  # type: ignore[arg-type]
            group.end = 0
            if parent is not None and parent.live and parent.time == group.time:
                group.parent = parent
                parent.children += 1
        self._group[slot] = group.id
        group.slots[group.slots == slot] = _NONE  # it had another block of the group before
        if place >= len(group.slots):  # its last blocks have been evicted meanwhile
            group.slots = np.append(group.slots, np.full(place + 1 - len(group.slots), _NONE, np.intp))
        group.slots[place] = slot
        group.live += 1
        self._state[slot] = _IDLE
        group.end = max(group.end, place + 1)
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
