"""All tiers that KVBM knows, the near one first, then from fast to slow.

A new tier is a folder beside this file and its ``TIER`` in the line below, or a call of :func:`register` before the
engine starts, in the process of every rank and of the leader.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbm.config import Config
from kvbm.core.rate import Rate
from kvbm.plans import DEVICE, TierName
from kvbm.tiers import disk, host, objects, peers
from kvbm.tiers.base import Fingerprint, Tier

NEAR = host.TIER
TIERS: dict[TierName, Tier] = {tier.name: tier for tier in (NEAR, disk.TIER, peers.TIER, objects.TIER)}


def register(tier: Tier) -> None:
    """Add a tier, slower than all others."""
    if tier.name in TIERS or not tier.staged:
        raise ValueError(f"tier {tier.name!r}: expected a staged tier with a name of its own")
    TIERS[tier.name] = tier


def wanted(config: Config) -> list[Tier]:
    """The staged tiers that the settings ask for."""
    return [tier for tier in TIERS.values() if tier.staged and tier.is_wanted(config)]


def outlives_engine(config: Config) -> bool:
    """Whether the next engine can find blocks of this one, in any tier."""
    return any(tier.outlives_engine(config) for tier in TIERS.values())


def has_cache(config: Config, cache: Fingerprint) -> bool:
    """Whether an engine with this fingerprint has left blocks on this machine."""
    from kvbm.tiers.disk.cache_dir import is_cache  # most commands need no database

    roots = [root for tier in TIERS.values() if (root := tier.cache_root(config)) is not None]
    return any(is_cache(root, cache) for root in roots)


def shares_near_memory(config: Config) -> bool:
    """Whether other processes map the near tier's memory."""
    return any(tier.shares_near_memory for tier in wanted(config))


def priors() -> Mapping[TierName, Rate]:
    """The rate of every tier until it is measured, the near tier first."""
    return {name: tier.prior for name, tier in TIERS.items()}


def resolve(word: str) -> TierName:
    """The name of a tier, or of the engine's own cache, from its name or upstream's number; empty if there is none."""
    if word.lower() in (DEVICE, "g1"):
        return DEVICE
    return next((tier.name for tier in TIERS.values() if word.lower() in (tier.name, tier.level)), "")
