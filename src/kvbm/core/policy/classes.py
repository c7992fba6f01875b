"""The classes of blocks: what a policy knows of them that says when they come back.

A class belongs to a family and has one value of each feature of that family. A family has its own distribution of
return times; each value of a feature multiplies the chance of a return (:mod:`kvbm.core.policy.returns`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod
from typing import NamedTuple

from kvbm.core.policy.base import Turn

TURNS, LENGTHS, OUTPUTS, TOUCHES = 6, 8, 4, 6
# What callers say: nothing, keep, drop early, the session is over. The factors are where learning begins.
LEVELS = (1.0, 2.0, 0.5, 0.1)


class Family(NamedTuple):
    first: int  # class
    features: tuple[int, ...]  # the number of values of each
    prior: float  # of the chance of a return, until the family has been seen

    @property
    def classes(self) -> int:
        return prod(self.features)

    @property
    def untold(self) -> int:
        """Of those, the first ones: of which callers say nothing."""
        return self.classes // len(LEVELS) if self.features[0] == len(LEVELS) else self.classes


PRIVATE = Family(0, (len(LEVELS), TURNS, LENGTHS, OUTPUTS), 1.0)  # blocks of one conversation
LAST = Family(PRIVATE.first + PRIVATE.classes, (len(LEVELS), TURNS), 1.0)  # the last block of a turn
REST = Family(LAST.first + LAST.classes, (len(LEVELS), 2), 0.5)  # left behind by a request that branched off
SHARED = Family(REST.first + REST.classes, (len(LEVELS), TOUCHES), 2.0)  # used by several conversations
OVERTAKEN = Family(SHARED.first + SHARED.classes, (1,), 0.1)  # last blocks without which the conversation went on
FAMILIES = (PRIVATE, LAST, REST, SHARED, OVERTAKEN)
CLASSES = OVERTAKEN.first + OVERTAKEN.classes
LOOSE = PRIVATE.first


def of_private(level: int, turn: int, new: int, output: int) -> int:
    turn, length = min(turn, TURNS) - 1, min(max(new, 1).bit_length(), LENGTHS) - 1
    spoken = 0 if output < 16 else 1 if output < 128 else 2 if output < 512 else 3
    return PRIVATE.first + ((level * TURNS + turn) * LENGTHS + length) * OUTPUTS + spoken


def of_last(level: int, turn: int) -> int:
    return LAST.first + level * TURNS + min(turn, TURNS) - 1


def of_rest(level: int, is_long: bool) -> int:
    return REST.first + level * 2 + is_long


def of_shared(level: int, touches: int) -> int:
    return SHARED.first + level * TOUCHES + min(touches.bit_length(), TOUCHES) - 1


def is_shared(kind: int) -> bool:
    return SHARED.first <= kind < OVERTAKEN.first


def level_said(turn: Turn, start: int) -> tuple[int, float]:
    """What the caller of a request says of its blocks from ``start`` on, and for how many seconds. It is one more
    feature, and learning finds out what it is worth: callers that promise a return and break the promise lose their
    influence."""
    if turn.is_final:
        return 3, inf
    if not turn.retention:
        return 0, inf
    said = [hint for hint in turn.retention if hint.seconds > 0 and hint.end > max(start, hint.start)]
    top = max((hint.priority for hint in said), default=0)
    seconds = max((hint.seconds for hint in said if hint.priority == top), default=inf)
    return (1 if top > 0 else 2 if top < 0 else 0), seconds


def level_of(kind: int) -> int:
    return _LEVELS[kind][0]


def without_level(kind: int) -> int:
    """The class if the caller had said nothing."""
    return _LEVELS[kind][1]


def _levels() -> Iterator[tuple[int, int]]:
    for family in FAMILIES:
        for at in range(family.classes):
            yield at // family.untold, family.first + at % family.untold


_LEVELS = list(_levels())  # of each class: the level, and the class without it
