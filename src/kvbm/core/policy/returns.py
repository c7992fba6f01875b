"""When blocks come back: what a policy learns of the time between two uses, for each class of blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

# Ages are counted in buckets that grow by half: from a quarter of a second to more than a day.
_FIRST_SECONDS = 0.25
_GROWTH = 1.5
BUCKETS = 32
_EDGES = [0.0, *(_FIRST_SECONDS * _GROWTH**i for i in range(BUCKETS - 1))]  # where each bucket begins
_WIDTHS = np.diff([*_EDGES, _EDGES[-1] * _GROWTH])
# A class borrows from its parent what it has not seen for itself: the parent counts as much as so many blocks.
_PARENT_WEIGHT = 10.0
# What is assumed before anything has been seen: the chance of a return is the same in each bucket, so that a block is
# worth less the older it is, as LRU has it.
_PRIOR_RETURN = 0.05
_DECAY = 0.998  # of everything learned, with each new table: half of it is forgotten after 350 tables


def bucket_of(seconds: float) -> int:
    return bisect_right(_EDGES, seconds) - 1


def end_of(bucket: int) -> float:
    """The age at which a block leaves this bucket."""
    return _EDGES[bucket + 1] if bucket + 1 < BUCKETS else float("inf")


class Returns:
    """Counts how many groups of blocks of each class reach an age (``exposed``), and return at it (``returned``).

    Groups that are still waiting count for the ages that they have reached, so early returns do not look more frequent
    than they are. The classes are the leaves of a tree: ``parents[i]`` is the number of a later node, or -1, and the
    chance of a return in node i is ``scales[i]`` times that of its parent until the node has seen more.
    """

    def __init__(self, classes: int, parents: Sequence[int], scales: Sequence[float]) -> None:
        self.returned = np.zeros((classes, BUCKETS))
        self.exposed = np.zeros((classes, BUCKETS))
        nodes = len(parents)
        members = np.zeros((nodes, classes))
        members[:classes] = np.eye(classes)
        depths = [0] * nodes
        for node in range(nodes - 1, -1, -1):
            depths[node] = depths[parents[node]] + 1 if parents[node] >= 0 else 0
        for node in range(nodes):  # parents come later
            if parents[node] >= 0:
                members[parents[node]] += members[node]
        self._members = members[classes:]
        self._layers = [np.array([i for i in range(nodes) if depths[i] == d]) for d in range(max(depths) + 1)]
        self._parents = np.array(parents)
        self._scales = np.array(scales)[:, None]
        self.values = np.empty((classes, BUCKETS))
        self.update()

    def update(self) -> None:
        """Make the table of values anew: the uses to be expected of a block for each second that it stays, if it is
        kept for the best of all times from now on. Few blocks are used again within seconds and many within minutes:
        a value that looked at the next moment only would evict the young ones."""
        self.returned *= _DECAY
        self.exposed *= _DECAY
        returned = np.concatenate([self.returned, self._members @ self.returned])
        exposed = np.concatenate([self.exposed, self._members @ self.exposed])
        hazard = np.empty_like(returned)
        for depth, layer in enumerate(self._layers):
            above = hazard[self._parents[layer]] if depth else _PRIOR_RETURN
            above = np.minimum(above * self._scales[layer], 0.99)
            hazard[layer] = (returned[layer] + _PARENT_WEIGHT * above) / (exposed[layer] + _PARENT_WEIGHT)
        self.values = _best_rates(np.minimum(hazard[: len(self.returned)], 0.999))


def _best_rates(hazard: np.ndarray) -> np.ndarray:
    """For each class and age: the largest ratio, over all horizons, of the chance of a return within the horizon to
    the time that the block is held for it."""
    best = np.zeros_like(hazard)
    chance = np.zeros_like(hazard)
    held = np.zeros_like(hazard)
    stays = np.ones_like(hazard)
    for ahead in range(BUCKETS):
        reach = BUCKETS - ahead
        now, left = hazard[:, ahead:], stays[:, :reach]
        chance[:, :reach] += left * now
        held[:, :reach] += left * (1 - 0.5 * now) * _WIDTHS[ahead:]
        left *= 1 - now
        np.maximum(best[:, :reach], chance[:, :reach] / held[:, :reach], out=best[:, :reach])
    return best
