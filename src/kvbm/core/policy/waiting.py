"""Groups that wait to be used again, and those of them that are worth least."""

from __future__ import annotations

from math import inf

import numpy as np

from kvbm.core.policy.classes import without_level
from kvbm.core.policy.group import Group
from kvbm.core.policy.returns import EDGES, NEXT_EDGES, WIDTH, Returns, bucket_of

# How many of a sample are evicted before the next one is taken: this part of all groups, between these bounds.
_LOWEST_PART, _MIN_LOWEST, _MAX_LOWEST = 128, 4, 16


class Waiting:
    """What ages and values depend on, in arrays without gaps: so a look takes 0.1 µs a group. ``sample``: how many are
    looked at together; if there are more, others each time."""

    def __init__(self, returns: Returns, sample: int) -> None:
        self._returns = returns
        self._sample = sample
        self._members: list[Group] = []
        self._times = np.zeros(64)
        self._expires = np.zeros(64)
        self._kinds = np.zeros(64, np.intp)
        self._buckets = np.zeros(64, np.intp)
        self._until = np.zeros(64)  # the age at which the next bucket begins
        self._any_expires = False
        self._offset = 0
        self._lowest: list[tuple[float, int, Group]] = []  # value, version, group; the lowest is last

    def __len__(self) -> int:
        return len(self._members)

    def add(self, group: Group) -> None:
        place = len(self._members)
        if place == len(self._times):
            self._times, self._expires = np.resize(self._times, 2 * place), np.resize(self._expires, 2 * place)
            self._kinds, self._buckets = np.resize(self._kinds, 2 * place), np.resize(self._buckets, 2 * place)
            self._until = np.resize(self._until, 2 * place)
        self._any_expires |= group.expires < inf
        self._members.append(group)
        group.home, group.place = self, place
        self._times[place], self._expires[place] = group.time, group.expires
        self._kinds[place], self._buckets[place] = group.kind, group.bucket
        self._until[place] = NEXT_EDGES[group.bucket]

    def remove(self, group: Group) -> None:
        place, last = group.place, self._members.pop()
        group.home = None
        group.bucket = int(self._buckets[place])
        if last is not group:
            self._members[place] = last
            for each in (self._times, self._expires, self._kinds, self._buckets, self._until):
                each[place] = each[last.place]
            last.place = place

    def look(self, now: float) -> tuple[slice, np.ndarray]:
        """Count the ages that some of the groups have reached. Returns which groups, and their ages."""
        stride = max(1, -(-len(self._members) // self._sample))
        self._offset = (self._offset + 1) % stride
        part = slice(self._offset, len(self._members), stride)
        ages = now - self._times[part]
        older = (ages >= self._until[part]).nonzero()[0]
        if len(older):
            places = part.start + older * stride
            buckets = EDGES.searchsorted(ages[older], "right") - 1
            cells = self._kinds[places] * WIDTH + 1
            self._returns.expose(cells + self._buckets[places], cells + buckets)
            self._buckets[places] = buckets
            self._until[places] = NEXT_EDGES[buckets]
        for at in np.flatnonzero(self._expires[part] <= now).tolist() if self._any_expires else ():
            place = part.start + at * stride
            group = self._members[place]
            group.kind, group.expires = without_level(group.kind), inf
            self._kinds[place], self._expires[place] = group.kind, inf
        return part, ages

    def forget_values(self) -> None:
        """There is a new table of values."""
        self._lowest.clear()

    def lowest(self, now: float) -> tuple[float, Group | None]:
        """The group with the lowest value of a sample, and the value."""
        while self._members:
            while self._lowest:
                value, version, group = self._lowest[-1]
                if version == group.version:
                    return value, group
                self._lowest.pop()
            part, ages = self.look(now)
            values = self._values(part, ages)
            count = min(max(len(self._members) // _LOWEST_PART, _MIN_LOWEST), _MAX_LOWEST)
            chosen = np.argpartition(values, count)[:count] if len(values) > count else np.arange(len(values))
            for at in chosen[np.argsort(-values[chosen])].tolist():
                group = self._members[part.start + at * (part.step or 1)]
                self._lowest.append((float(values[at]), group.version, group))
        return inf, None

    def _values(self, part: slice, ages: np.ndarray) -> np.ndarray:
        return self._returns.values_at(self._kinds[part], ages, self._buckets[part])


def age(returns: Returns, group: Group, now: float) -> None:
    """The group, which waits nowhere at present, has reached the age that it has now."""
    bucket = bucket_of(now - group.time)
    if bucket > group.bucket:
        first = group.kind * WIDTH + 1
        returns.exposed[first + group.bucket] += returns.weight
        returns.exposed[first + bucket] -= returns.weight
        group.bucket = bucket
    if group.expires <= now:
        group.kind, group.expires = without_level(group.kind), inf
