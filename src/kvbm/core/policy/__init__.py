"""Eviction policies: which block goes when a tier is full, and which blocks a tier takes in.

A new policy is a file beside these and a line in ``POLICIES``.
"""

from collections.abc import Callable

from kvbm.core.policy.base import EvictionPolicy
from kvbm.core.policy.lru import LRU

__all__ = ["LRU", "POLICIES", "EvictionPolicy", "make_policy"]

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {"lru": LRU}


def make_policy(name: str, slots: int) -> EvictionPolicy:
    """The policy of this name for a tier of so many slots."""
    if name not in POLICIES:
        raise ValueError(f"eviction policy {name!r}: expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](slots)
