"""Groups that wait to be used again, by their classes and ages."""

from __future__ import annotations

from collections import defaultdict, deque
from heapq import heappop, heappush
from math import inf

import numpy as np

from kvbm.core.policy.classes import without_level
from kvbm.core.policy.group import Group
from kvbm.core.policy.returns import BUCKETS, Returns, bucket_of, end_of


class Waiting:
    """A queue for each *cell*: a row of the table of values, and a bucket of ages. The oldest group is first, and moves
    on to the next bucket when it has outgrown this one. An entry is void once the group's version is another."""

    def __init__(self, returns: Returns) -> None:
        self._returns = returns
        self._queues: defaultdict[int, deque[tuple[int, Group]]] = defaultdict(deque)
        self._due: list[tuple[float, int]] = []  # heap: when the first group of a cell outgrows it; once for each cell
        self._scheduled: set[int] = set()

    def add(self, group: Group) -> int:
        """Returns the cell."""
        cell = self._returns.rows[group.kind] * BUCKETS + group.bucket
        self._queues[cell].append((group.version, group))
        if cell not in self._scheduled:
            self._scheduled.add(cell)
            heappush(self._due, (group.time + end_of(group.bucket), cell))
        return cell

    def first(self, cell: int) -> Group | None:
        queue = self._queues[cell]
        while queue:
            version, group = queue[0]
            if version == group.version:
                return group
            queue.popleft()
        return None

    def age(self, group: Group, now: float) -> None:
        bucket = bucket_of(now - group.time)
        if bucket > group.bucket:
            first = group.kind * BUCKETS + 1
            for cell in range(first + group.bucket, first + bucket):
                self._returns.exposed[cell] += 1
            group.bucket = bucket
        if group.expires <= now:
            group.kind, group.expires = without_level(group.kind), inf

    def advance(self, now: float) -> None:
        """Move the groups on that have outgrown their buckets."""
        while self._due and self._due[0][0] <= now:
            cell = heappop(self._due)[1]
            self._scheduled.discard(cell)
            end = end_of(cell % BUCKETS)
            queue = self._queues[cell]
            while (group := self.first(cell)) is not None and group.time + end <= now:
                queue.popleft()
                self.age(group, now)
                self.add(group)
            if group is not None and cell not in self._scheduled:
                self._scheduled.add(cell)
                heappush(self._due, (group.time + end, cell))


class Candidates(Waiting):
    """Those that may be evicted: finds the cell with the lowest value."""

    def __init__(self, returns: Returns) -> None:
        super().__init__(returns)
        self._values = returns.values.ravel()  # the same memory
        self._rank = np.full(self._values.size, np.inf)  # the values of cells with groups

    def add(self, group: Group) -> int:
        cell = super().add(group)
        self._rank[cell] = self._values[cell]
        return cell

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
