"""Host memory of other engines of the same model: neighbours on this machine, and peers on other machines.

``finder`` and ``finders``: which engines to ask. ``lookup``, ``catalog``: the leader's half. ``store``, ``client``: a
rank's half, which reads. ``board``: what an engine serves, in shared memory. ``launch``, ``server``, ``serving``: the
process beside the engine that serves it. ``wire``: their conversation. ``sources``: what leader and ranks share.
"""

from __future__ import annotations

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.rate import Rate
from kvbm.tiers.base import LeaderContext, RankContext, Store, Tier
from kvbm.tiers.bounded import Call


class PeerTier(Tier, frozen=True, kw_only=True):
    def is_wanted(self, config: Config) -> bool:
        return config.peers_enabled and config.has_host_tier

    def outlives_engine(self, config: Config) -> bool:
        """Other engines find this one's blocks: the cache needs a fingerprint."""
        return self.is_wanted(config)

    def open_store(self, context: RankContext) -> Call[Store | None] | None:
        from kvbm.tiers.peers.open import open_store

        return open_store(context)

    def open_catalog(self, context: LeaderContext) -> Catalog | None:
        from kvbm.tiers.peers.open import open_catalog

        return open_catalog(context)


TIER = PeerTier(
    name="peer",
    level="g2p",
    medium="EXTERNAL",
    # As fast as a neighbour's memory. A GPU computes blocks of an 8B model at 4 GB/s: with a slower prior no block
    # would ever be read, and no rate measured.
    prior=Rate(8e9, 0.002),
    size_setting="KVBM_PEERS_ENABLED",
    keyed=True,
    writable=False,
    shared=True,
    shares_near_memory=True,
    advice="use engines on the same machine or in the same network (KVBM_PEERS)",
)
