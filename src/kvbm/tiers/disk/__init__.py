"""A local disk: blocks in one file a rank, which the next engine finds again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.clock import Clock
from kvbm.core.rate import Rate
from kvbm.plans import DEVICE
from kvbm.tiers.base import LeaderContext, RankContext, Route, Store, Tier
from kvbm.tiers.bounded import Call


class DiskTier(Tier, frozen=True, kw_only=True):
    # Files, index and filter are imported when they are opened: the process that answers the metrics port and the
    # command line need the declaration alone.

    def is_wanted(self, config: Config) -> bool:
        return config.has_disk_tier

    def cache_root(self, config: Config) -> Path | None:
        return config.disk_cache_dir if self.is_wanted(config) else None

    def open_store(self, context: RankContext) -> Call[Store | None] | None:
        from kvbm.tiers.disk.open import open_store

        return open_store(context)

    def staging_slots(self, config: Config, slot_bytes: int) -> int:
        from kvbm.tiers.disk.open import staging_slots

        return staging_slots(config, slot_bytes)

    def eviction_policy(self, config: Config) -> str:
        return config.disk_policy

    def open_catalog(self, context: LeaderContext) -> Catalog | None:
        from kvbm.tiers.disk.open import open_catalog

        return open_catalog(context)

    def connect(self, config: Config, clock: Clock) -> Sequence[Route]:
        from kvbm.core.policy.admission import FrequencyFilter

        filtered = config.has_host_tier and not config.disable_disk_offload_filter
        rule = FrequencyFilter(
            clock, config.disk_filter_threshold, config.disk_filter_decay_secs, config.disk_filter_max_entries
        )
        pending, bypass = config.max_pending_spills, not config.has_host_tier
        return [Route(self.name, None, rule if filtered else None, pending, bypass)]


TIER = DiskTier(
    name="disk",
    level="g3",
    medium="STORAGE",
    prior=Rate(5e9, 0.002),
    size_setting="DYN_KVBM_DISK_CACHE_GB",
    policy_setting="KVBM_DISK_POLICY",
    persistent=True,
    advice="put DYN_KVBM_DISK_CACHE_DIR on local NVMe",
    offload_metrics={"h2d": "host", "d2d": DEVICE},
    onboard_metric="d2d",
)
