"""Groups that wait to be used again, by their classes and ages."""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush
from math import inf

import numpy as np

from kvbm.core.policy.classes import without_level
from kvbm.core.policy.group import Group
from kvbm.core.policy.returns import BUCKETS, Returns, end_of


class Waiting:
    """A queue for each *cell*: a row of the table of values, and a bucket of ages. The oldest group is first, and moves
    on to the next bucket when it has outgrown this one. An entry is void once the group's version is another."""

    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self._queues: defaultdict[int, deque[tuple[int, Group]]] = defaultdict(deque)
        self._due: list[tuple[float, int]] = []  # heap: when the first group of a cell moves on; once for each cell
        self._scheduled: set[int] = set()

    def add(self, group: Group) -> None:
        self._append(group, (group.version, group))

    def _append(self, group: Group, entry: tuple[int, Group]) -> None:
        cell = self._returns.rows[group.kind] * BUCKETS + group.bucket
        queue = self._queues[cell]
        if not queue:
            self._begun(cell)
            if cell not in self._scheduled:
                self._schedule(cell, group)
        queue.append(entry)

    def _begun(self, cell: int) -> None:
        """The cell gets its first group."""
        return

    def _schedule(self, cell: int, first: Group) -> None:
        self._scheduled.add(cell)
        heappush(self._due, (_outgrown_at(first, cell % BUCKETS), cell))

    def first(self, cell: int) -> Group | None:
        queue = self._queues[cell]
        while queue:
            version, group = queue[0]
            if version == group.version:
                return group
            queue.popleft()
        return None

    def age(self, group: Group, now: float) -> None:
        """The group has reached the age that it has now."""
        bucket = group.bucket
        while _is_outgrown(group, bucket, now):
            bucket += 1
            self._returns.exposed[group.kind * BUCKETS + bucket] += 1
        group.bucket = bucket
        if group.expires <= now:
            group.kind, group.expires = without_level(group.kind), inf

    def advance(self, now: float) -> None:
        """Move the groups on that have outgrown their buckets."""
        while self._due and self._due[0][0] <= now:
            cell = heappop(self._due)[1]
            self._scheduled.discard(cell)
            queue = self._queues[cell]
            while queue:
                version, group = queue[0]
                if version == group.version:
                    if not _is_outgrown(group, cell % BUCKETS, now):
                        self._schedule(cell, group)
                        break
                    self.age(group, now)
                    self._append(group, queue[0])
                queue.popleft()


def _outgrown_at(group: Group, bucket: int) -> float:
    return group.time + end_of(bucket)


def _is_outgrown(group: Group, bucket: int, now: float) -> bool:
    """The one comparison of ages: with another one that rounds differently, a group could be due and never move on."""
    return _outgrown_at(group, bucket) <= now


class Candidates(Waiting):
    """Those that may be evicted: finds the cell with the lowest value."""

    def __init__(self, returns: Returns) -> None:
        super().__init__(returns)
        self._values = returns.values.ravel()  # the same memory
        self._rank = np.full(self._values.size, np.inf)  # the values of cells with groups

    def _begun(self, cell: int) -> None:
        self._rank[cell] = self._values[cell]

    def revalue(self) -> None:
        """There is a new table of values."""
        self._rank = np.where(self._rank < np.inf, self._values, np.inf)

    def lowest(self) -> tuple[float, Group | None]:
        """The group with the lowest value, and the value."""
        while True:
            cell = int(self._rank.argmin())
            value = float(self._rank[cell])
            if value == np.inf:
                return value, None
            if (group := self.first(cell)) is not None:
                return value, group
            self._rank[cell] = np.inf
