"""Eviction policies: which block goes when a tier is full, and which blocks a tier takes in.

A new policy is a file beside these and a line in ``POLICIES``.
"""

from collections.abc import Callable

from kvbm.core.clock import Clock
from kvbm.core.policy.base import COMMON, NO_HINTS, EvictionPolicy, Retention, Turn
from kvbm.core.policy.lru import LRU
from kvbm.core.policy.queues import ARC, S3FIFO
from kvbm.core.policy.session import SessionAware

__all__ = [
    "ARC",
    "COMMON",
    "LRU",
    "NO_HINTS",
    "POLICIES",
    "EvictionPolicy",
    "Retention",
    "Turn",
    "make_policy",
]

POLICIES: dict[str, Callable[[int, Clock], EvictionPolicy]] = {
    "lru": lambda slots, clock: LRU(slots),
    "arc": lambda slots, clock: ARC(slots),
    "s3fifo": lambda slots, clock: S3FIFO(slots),
    "session": SessionAware,
}


def make_policy(name: str, slots: int, clock: Clock) -> EvictionPolicy:
    """The policy of this name for a tier of so many slots. ``clock`` tells the time: core has none of its own."""
    if name not in POLICIES:
        raise ValueError(f"eviction policy {name!r}: expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](slots, clock)
