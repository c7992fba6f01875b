"""When blocks come back: what a policy learns of the time between two uses, for each class of blocks."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import product

import numpy as np

from kvbm.core.policy.classes import CLASSES, FAMILIES, LEVELS, Family

# Ages are counted in buckets that grow by a fifth: from a second to most of a day.
_FIRST_SECONDS = 1.0
_GROWTH = 1.2
BUCKETS = 56
WIDTH = BUCKETS + 1  # of a row of changes: one may be behind the last bucket
_EDGES = [0.0, *(_FIRST_SECONDS * _GROWTH**i for i in range(BUCKETS - 1))]  # where each bucket begins
EDGES = np.array(_EDGES)
NEXT_EDGES = np.append(EDGES[1:], np.inf)
_WIDTHS = np.diff([*_EDGES, _EDGES[-1] * _GROWTH])
_PAST = np.where(np.tri(BUCKETS, k=-1, dtype=bool), np.inf, 0.0)  # horizons that end before the bucket
# Classes with about the same chance of a return share a score: two scores double the chance.
SCORES = 16
_MIDDLE = 9
_FACTORS = 2.0 ** ((np.arange(SCORES) - _MIDDLE) / 2)
# A value of a feature, and a class, count for what they are after so many returns.
_FEATURE_WEIGHT = 3.0
_CLASS_WEIGHT = 100.0
# What is assumed before anything has been seen: the chance of a return is the same in each bucket, so that a block is
# worth less the older it is, as LRU has it.
_PRIOR_RETURN = 0.05
_PRIOR_WEIGHT = 10.0
_SMOOTHING = np.array([1, 2, 3, 2, 1]) / 9  # over neighbouring buckets: few returns make a ragged curve
_DECAY = 1 - 1 / 30_000  # of everything learned, with each turn: half is forgotten after 21,000
_MAX_WEIGHT = 1e6


def bucket_of(seconds: float) -> int:
    return bisect_right(_EDGES, seconds) - 1


class _Model:
    """One family: a chance of a return for each age, and a factor for each value of each feature."""

    def __init__(self, family: Family, returned: np.ndarray, exposed: np.ndarray) -> None:
        self._prior = family.prior * _PRIOR_RETURN
        self._returned, self._exposed = returned, exposed  # as in Returns, the classes of this family
        values = np.array(list(product(*map(range, family.features))))
        self._values = [values[:, i] for i in range(len(family.features))]
        self._scales = [np.ones(count) for count in family.features]
        if family.features[0] == len(LEVELS):
            self._scales[0] = np.array(LEVELS)
        self._logs = [np.log(scale) for scale in self._scales]
        self.ratios = np.exp(self._sum(len(values)))

    def _sum(self, classes: int) -> np.ndarray:
        logs: np.ndarray = sum(log[value[:classes]] for log, value in zip(self._logs, self._values, strict=True))
        return logs

    def fit(self, weight: float, classes: int) -> np.ndarray:
        """The chance of a return for each age, of a class with the ratio 1, from the first ``classes``: none of the
        others has been seen. One round of an iteration that goes on from table to table: the ages from the ratios of
        the classes, then one feature after the other."""
        returned, exposed, values = (
            self._returned[:classes],
            self._exposed[:classes],
            [v[:classes] for v in self._values],
        )
        returns_by_age = returned.sum(0)[:-1] / weight
        reached_by_age = np.cumsum(self.ratios[:classes] @ exposed)[:-1] / weight
        # Where few blocks have reached an age, a return is no likelier than at the age before it.
        chances, chance = [], self._prior
        for seen, reached in zip(returns_by_age.tolist(), reached_by_age.tolist(), strict=True):
            assumed = self._prior if reached >= _PRIOR_WEIGHT else min(chance, self._prior)
            chance = (seen + _PRIOR_WEIGHT * assumed) / (reached + _PRIOR_WEIGHT)
            chances.append(chance)
        hazard = np.convolve([*chances[:1] * 2, *chances, *chances[-1:] * 2], _SMOOTHING, mode="valid")
        np.minimum(hazard, 0.9, out=hazard)
        # A change of the exposed at an age counts for that age and all later ones.
        later = np.append(np.cumsum(hazard[::-1])[::-1], 0.0)
        counts, expected = returned.sum(1) / weight, np.maximum(exposed @ later, 0.0) / weight
        total = self._sum(classes)
        for i, (value, scale) in enumerate(zip(values, self._scales, strict=True)):
            others = expected * np.exp(total - self._logs[i][value])
            more = np.bincount(value, counts, len(scale)) + _FEATURE_WEIGHT * scale
            log = np.log(more / (np.bincount(value, others, len(scale)) + _FEATURE_WEIGHT))
            total += log[value] - self._logs[i][value]
            self._logs[i] = log
        ratios = np.exp(total)
        self.ratios[:classes] = ratios * (counts + _CLASS_WEIGHT) / (expected * ratios + _CLASS_WEIGHT)
        return hazard


class Returns:
    """Counts how many groups of blocks of each class reach an age (``exposed``), and return at it (``returned``).

    Groups that are still waiting count for the ages that they have reached, so early returns do not look more frequent
    than they are. What is new counts for more (``weight``), so that what is old is forgotten. ``exposed`` has changes
    from one age to the next: a group that grows older is two of them, however much older.
    """

    def __init__(self) -> None:
        # Flat arrays, entry ``class * WIDTH + bucket``: numpy takes three times as long to add one to an element.
        self.returned = array("d", [0.0]) * (CLASSES * WIDTH)
        self.exposed = array("d", [0.0]) * (CLASSES * WIDTH)
        self.weight = 1.0
        self.has_hints = True  # any caller has said something
        self._counts = [np.frombuffer(counts) for counts in (self.returned, self.exposed)]
        returned, exposed = (counts.reshape(CLASSES, WIDTH) for counts in self._counts)
        self._models = []
        for family in FAMILIES:
            mine = slice(family.first, family.first + family.classes)
            self._models.append(_Model(family, returned[mine], exposed[mine]))
        self.values = np.zeros((len(FAMILIES) * SCORES, BUCKETS))  # by row and bucket, where the bucket begins
        self._slopes = np.zeros_like(self.values)  # from there to the next
        self.rows = array("i", [0]) * CLASSES  # of each class: its family and score
        self.all_rows = np.frombuffer(self.rows, np.int32)  # the same memory
        self._next = 0
        for _ in FAMILIES:
            self.update()
        self.has_hints = False

    def expose(self, first: np.ndarray, end: np.ndarray) -> None:
        """Groups have reached the ages from the first to the one before the end."""
        np.add.at(self._counts[1], first, self.weight)
        np.subtract.at(self._counts[1], end, self.weight)

    def update(self, turns: int = 0) -> None:
        """Make the table of values anew for one family, the next each time: the uses to be expected of a block for each
        second that it stays, if it is kept for the best of all times from now on. Few blocks are used again within
        seconds and many within minutes: a value that looked at the next moment only would evict the young ones."""
        number, self._next = self._next, (self._next + 1) % len(FAMILIES)
        model, family = self._models[number], FAMILIES[number]
        self.weight /= _DECAY**turns
        if self.weight > _MAX_WEIGHT:
            for counts in self._counts:
                counts /= self.weight
            self.weight = 1.0
        # Most classes are of hints: until a caller has given one, a table takes half the time without them.
        classes = family.classes if self.has_hints else family.untold
        hazard = model.fit(self.weight, classes)
        scores = np.clip(np.rint(2 * np.log2(model.ratios[:classes])) + _MIDDLE, 0, SCORES - 1).astype(np.int32)
        first = number * SCORES
        self.all_rows[family.first : family.first + classes] = first + scores
        some = np.flatnonzero(np.bincount(scores))
        rates = _best_rates(np.minimum(hazard * _FACTORS[some, None], 0.99))
        self.values[first + some] = rates
        self._slopes[first + some, :-1] = np.diff(rates, axis=1) / _WIDTHS[:-1]

    def values_at(self, kinds: np.ndarray, ages: np.ndarray, buckets: np.ndarray) -> np.ndarray:
        """The values of groups of these classes and ages."""
        cells = self.all_rows[kinds] * BUCKETS + buckets
        found: np.ndarray = self._slopes.ravel()[cells]
        found *= ages - EDGES[buckets]
        found += self.values.ravel()[cells]
        return found


def _best_rates(hazard: np.ndarray) -> np.ndarray:
    """For each score and age: the largest ratio, over all horizons, of the chance of a return within the horizon to
    the time that the block is held for it. Both are differences of sums over later ages, so that nothing is lost where
    few blocks are left."""
    stays = np.ones((len(hazard), BUCKETS + 1))  # those of all blocks that reach the bucket
    np.cumprod(1 - hazard, axis=1, out=stays[:, 1:])
    later = np.zeros_like(stays)  # seconds for which blocks are held from the bucket on
    held = stays[:, :-1] * (1 - 0.5 * hazard) * _WIDTHS
    later[:, :-1] = np.cumsum(held[:, ::-1], axis=1)[:, ::-1]
    returned = stays[:, :-1, None] - stays[:, None, 1:]
    seconds = later[:, :-1, None] - later[:, None, 1:]
    seconds += _PAST
    returned /= seconds
    rates: np.ndarray = returned.max(axis=2)
    return rates
