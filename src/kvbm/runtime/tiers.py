"""The tiers of an engine, from what its ranks have said of themselves, and the disk's books from the last engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvbm.config import Config
from kvbm.core.catalog import Catalog
from kvbm.core.manager import BlockManager
from kvbm.core.policy.admission import FrequencyFilter
from kvbm.core.pool import Pool
from kvbm.core.rate import Rate
from kvbm.plans import Hello, TierName
from kvbm.runtime.leader import Leader
from kvbm.tiers import disk as disk_tier
from kvbm.tiers.bounded import Call
from kvbm.tiers.disk.index import Fingerprint, Index, cache_directory, common_fingerprint
from kvbm.tiers.lock import PATIENCE_SECONDS
from kvbm.tiers.registry import NEAR

logger = logging.getLogger("kvbm")


class DiskTier:
    """The disk as the leader sees it: which slots hold which blocks."""

    def __init__(self, pool: Pool, index: Index) -> None:
        self.pool = pool
        self.index = index

    @classmethod
    def open(cls, config: Config, hellos: Sequence[Hello], cache: Fingerprint) -> DiskTier | None:
        """None, with a sentence, when there is no disk that all ranks can use."""
        opened = [tier for hello in hellos if (tier := hello.tier(disk_tier.TIER.name)) is not None]
        slots = min((tier.slots for tier in opened), default=0) if len(opened) == len(hellos) else 0
        if slots < 1:
            return None  # a rank that has none has said why
        name = common_fingerprint(cache, (hello.layout for hello in hellos))
        if name is None:
            logger.warning("there is no disk tier: the ranks have layers of different kinds, and no common cache")
            return None
        directory = cache_directory(config.disk_cache_dir, name)
        if others := {tier.store for tier in opened} - {directory.name}:
            logger.warning(
                "disk tier off: the ranks compute different cache directories (leader %s, ranks %s). Give all ranks "
                "the same model, settings and KVBM release",
                directory.name, ", ".join(sorted(others)),
            )  # fmt: skip
            return None
        try:
            about = {"ranks": len(hellos), "block_bytes": sum(hello.block_bytes for hello in hellos)}
            opening = Call(
                lambda: Index.open(directory, name, slots, patience=PATIENCE_SECONDS, about=about),
                str(directory), Index.close,
            )  # fmt: skip
            index = opening.result()
        except Exception as error:
            why = isinstance(error, OSError) and error.strerror
            logger.warning(
                "there is no disk tier: %s. This engine runs without it; blocks on disk are kept for the next start",
                why or f"{type(error).__name__}: {error}",
            )
            return None
        pool = Pool(slots, journal=index)
        found = pool.adopt(index.entries())
        logger.info("disk tier: %d of %d blocks are there from before, in %s", found, slots, directory)
        return cls(pool, index)

    def serve(self, config: Config, leader: Leader) -> None:
        """Let blocks move on to this disk."""
        filtered = config.has_host_tier and not config.disable_disk_offload_filter
        leader.add_edge(
            disk_tier.TIER.name,
            FrequencyFilter(
                time.monotonic,
                config.disk_filter_threshold,
                config.disk_filter_decay_secs,
                config.disk_filter_max_entries,
            )
            if filtered
            else None,
            config.max_pending_spills,
            bypass=not config.has_host_tier,
        )


def agreed_weights(hellos: Sequence[Hello]) -> str:
    """The digest of the weights that all ranks have agreed on. Empty when the ranks disagree (logged) or have no
    digest (they logged why); persistence is then off."""
    found = {hello.weights for hello in hellos}
    if len(found) == 1:
        return found.pop()  # empty: the ranks have said why
    named = ", ".join(f"rank {hello.rank}: {hello.weights or 'none'}" for hello in hellos)
    logger.warning("Cannot fingerprint the weights; persistence is off: the ranks disagree (%s)", named)
    return ""


def make_manager(hellos: Sequence[Hello], disk: DiskTier | None) -> BlockManager:
    catalogs: dict[TierName, Catalog] = {NEAR.name: Pool(min(hello.slots[NEAR.name] for hello in hellos))}
    if disk is not None:
        catalogs[disk_tier.TIER.name] = disk.pool
    return BlockManager(catalogs)


def measured(hellos: Sequence[Hello], tier: TierName) -> Rate | None:
    """The rate on the slowest rank; None unless all ranks have measured it."""
    rates = [None if (known := hello.tier(tier)) is None else known.rate for hello in hellos]
    found = [rate for rate in rates if rate is not None]
    if not found or len(found) < len(rates):
        return None
    return Rate(min(rate for rate, _ in found), max(fixed for _, fixed in found))
