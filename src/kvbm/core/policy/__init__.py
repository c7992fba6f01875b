"""Who is evicted when a tier is full, and what is admitted to the next one."""

from kvbm.core.policy.admission import FrequencyFilter
from kvbm.core.policy.base import EvictionPolicy
from kvbm.core.policy.lru import LRU

__all__ = ["LRU", "EvictionPolicy", "FrequencyFilter"]
