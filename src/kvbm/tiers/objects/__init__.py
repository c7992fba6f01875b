"""An object store: any S3-compatible one, in which every engine of the same model finds the blocks of the others.

``format`` the bytes and names of objects; ``client`` requests; ``store`` a rank's half, ``process`` the process that it
runs in and ``process_store`` the rank's end of that; ``presence`` and ``catalog`` the leader's half; ``capacity`` the
bound on blocks; ``tools`` and ``doctor`` for the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.clock import Clock
from kvbm.core.rate import Rate
from kvbm.tiers import disk
from kvbm.tiers.base import LeaderContext, RankContext, Route, Store, Tier
from kvbm.tiers.bounded import Call

if TYPE_CHECKING:
    from kvbm.core.policy.admission import FrequencyFilter


class ObjectTier(Tier, frozen=True, kw_only=True):
    # obstore is imported when the tier is opened: it comes with the extra `objects`.

    def is_wanted(self, config: Config) -> bool:
        return config.object_enabled and config.has_host_tier

    def open_store(self, context: RankContext) -> Call[Store | None] | None:
        from kvbm.tiers.objects.open import open_store

        return open_store(context)

    def open_catalog(self, context: LeaderContext) -> Catalog | None:
        from kvbm.tiers.objects.open import open_catalog

        return open_catalog(context)

    def connect(self, config: Config, clock: Clock) -> Sequence[Route]:
        """From host memory; blocks that only the disk has come from there, once a request has found them."""
        sources = [None, disk.TIER.name] if config.has_disk_tier else [None]
        return [Route(self.name, source, _admission(config, clock), config.max_pending_spills) for source in sources]


def _admission(config: Config, clock: Clock) -> FrequencyFilter | None:
    """The same rule as for the disk."""
    if config.disable_disk_offload_filter:
        return None
    from kvbm.core.policy.admission import FrequencyFilter

    return FrequencyFilter(
        clock, config.disk_filter_threshold, config.disk_filter_decay_secs, config.disk_filter_max_entries
    )


TIER = ObjectTier(
    name="object",
    level="g4",
    medium="EXTERNAL",
    prior=Rate(1e9, 0.05),
    size_setting="DYN_KVBM_OBJECT_NUM_BLOCKS",
    keyed=True,
    persistent=True,
    shared=True,
    shares_near_memory=True,
    advice="use a store in the same network (DYN_KVBM_OBJECT_ENDPOINT)",
    offload_metrics={"d2o": ""},
    onboard_metric="o2d",
    counts_failures=True,
)
