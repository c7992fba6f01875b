"""Host memory: the near tier. The copier moves blocks between its slots and the engine's cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.rate import Rate
from kvbm.plans import DEVICE
from kvbm.tiers.base import LeaderContext, RankContext, Tier

if TYPE_CHECKING:
    from kvbm.tiers.host.slab import HostSlab


class HostTier(Tier, frozen=True, kw_only=True):
    """The near tier has memory that the copier reaches in place of a store: a slab. Staged tiers use its slots as
    staging buffers, so it is opened whether or not the user wants a host tier."""

    # Slabs are imported when they are opened: metrics and the command line need the declaration alone.

    def is_wanted(self, config: Config) -> bool:
        return config.has_host_tier

    def outlives_engine(self, config: Config) -> bool:
        return config.host_persist and config.has_host_tier

    def cache_root(self, config: Config) -> Path | None:
        return config.host_persist_dir if self.outlives_engine(config) else None

    def slots(self, context: RankContext, copies: int) -> int:
        """Slots for the memory that the user grants all ranks, which keep ``copies`` of a block."""
        config = context.config
        return context.slots_for(self.size_setting, config.cpu_cache_gb, config.cpu_cache_override_num_blocks, copies)

    def open_slab(self, context: RankContext, slots: int, may_persist: bool) -> HostSlab:
        """Ask for the memory. Raises when it cannot be had. Threads fault it in while the engine goes on."""
        from kvbm.tiers.host.open import open_slab

        return open_slab(context, slots, may_persist)

    def carve(self, context: RankContext, slab: HostSlab) -> HostSlab:
        """The slab in slots, once its memory is there. Another slab where this one cannot outlive the engine."""
        from kvbm.tiers.host.open import carve

        return carve(context, slab)

    def node(self, context: RankContext) -> int | None:
        """The NUMA node of the rank's own GPU, unless the settings say that it does not matter."""
        from kvbm.tiers.host import numa

        return None if context.config.disable_numa else numa.node_of_device(context.device)

    def eviction_policy(self, config: Config) -> str:
        return config.host_policy

    def open_catalog(self, context: LeaderContext) -> Catalog | None:
        from kvbm.tiers.host.persistent_host import open_pool

        return open_pool(context)


TIER = HostTier(
    name="host",
    level="g2",
    medium="CPU",
    prior=Rate(20e9, 0.0005),
    size_setting="DYN_KVBM_CPU_CACHE_GB",
    policy_setting="KVBM_HOST_POLICY",
    staged=False,
    offload_metrics={"d2h": DEVICE},
    onboard_metric="h2d",
)
