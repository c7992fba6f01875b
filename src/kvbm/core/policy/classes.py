"""The classes of blocks that are expected to come back alike."""

from __future__ import annotations

TURNS, LENGTHS, TOUCHES, LEVELS = 6, 8, 5, 4

_PRIVATE = 0
_LAST = _PRIVATE + TURNS * LENGTHS
_REST = _LAST + TURNS
_SHARED = _REST + 2
_ODD = _SHARED + TOUCHES
_KINDS = _ODD + 2

LOOSE = _ODD
OVERTAKEN = _ODD + 1
CLASSES = _KINDS * LEVELS
_LEVEL_SCALES = (1.0, 2.0, 0.5, 0.1)


def of_private(turn: int, new: int, level: int) -> int:
    return level * _KINDS + _PRIVATE + (min(turn, TURNS) - 1) * LENGTHS + min(new.bit_length(), LENGTHS) - 1 + (new < 1)


def of_last(turn: int, level: int) -> int:
    return level * _KINDS + _LAST + min(turn, TURNS) - 1


def of_rest(is_long: bool, level: int) -> int:
    return level * _KINDS + _REST + is_long


def of_shared(touches: int, level: int) -> int:
    return level * _KINDS + _SHARED + min(touches.bit_length() - 1, TOUCHES) - 1


def is_shared(kind: int) -> bool:
    return _SHARED <= kind % _KINDS < _ODD


def level_of(kind: int) -> int:
    return kind // _KINDS


def _tree() -> tuple[list[int], list[float]]:
    """Parents and scales of the nodes: the classes, then (level, turn), (level, family), family."""
    families = 5  # private, last, rest, shared, overtaken
    turn_at = CLASSES
    level_at = turn_at + LEVELS * TURNS
    family_at = level_at + LEVELS * families
    parents: list[int] = []
    scales: list[float] = []
    for level in range(LEVELS):
        base = level_at + level * families
        for turn in range(TURNS):
            parents += [turn_at + level * TURNS + turn] * LENGTHS
        parents += [base + 1] * TURNS + [base + 2] * 2 + [base + 3] * TOUCHES + [base, base + 4]
        scales += [1.0] * _KINDS
    for level in range(LEVELS):
        parents += [level_at + level * families] * TURNS
        scales += [1.0] * TURNS
    for level in range(LEVELS):
        parents += [family_at + family for family in range(families)]
        scales += [_LEVEL_SCALES[level]] * families
    parents += [-1] * families
    scales += [1.0, 1.0, 0.5, 2.0, 0.1]
    return parents, scales


PARENTS, SCALES = _tree()
