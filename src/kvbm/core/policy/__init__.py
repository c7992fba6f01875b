"""Who is evicted when a tier is full."""

from kvbm.core.policy.base import EvictionPolicy
from kvbm.core.policy.lru import LRU

__all__ = ["LRU", "EvictionPolicy"]
