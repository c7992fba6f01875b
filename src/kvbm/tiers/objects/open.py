"""Opening the object store tier: a rank's store, and the leader's catalog."""

from __future__ import annotations

import logging

from kvbm.core.catalog import Catalog
from kvbm.tiers import objects
from kvbm.tiers.base import LeaderContext, RankContext, Store
from kvbm.tiers.bounded import Call, reason_of
from kvbm.tiers.objects.capacity import Keeper, statement
from kvbm.tiers.objects.catalog import ObjectCatalog
from kvbm.tiers.objects.client import Client
from kvbm.tiers.objects.format import Names, group_bits
from kvbm.tiers.objects.presence import Presence
from kvbm.tiers.objects.process import Setup
from kvbm.tiers.objects.process_store import ProcessStore
from kvbm.tiers.objects.settings import settings_for

logger = logging.getLogger("kvbm")


def open_store(context: RankContext) -> Call[Store | None] | None:
    """This rank's store. A store that does not answer now is opened all the same: it is used once it answers."""
    if context.cache is None:
        if context.rank == 0:
            logger.warning("there is no object store tier: this engine has no fingerprint of its weights")
        return None
    return Call(lambda: _open_store(context), "object store", lambda store: store.close() if store else None)


def _open_store(context: RankContext) -> Store | None:
    """In a process of its own where that can map the near tier's memory, else in threads of this process."""
    assert context.cache is not None
    config = context.config
    try:
        settings = settings_for(config, context.rank)
        level = logger.getEffectiveLevel()
        setup = Setup(settings, dict(context.cache), context.rank, context.ranks, context.slot_bytes, level)
        is_mappable = context.shares_near_memory and context.access == "own" and not config.host_persist
        return ProcessStore(setup) if is_mappable else setup.open_store()
    except Exception as error:
        logger.warning("rank %d goes on without an object store: %s", context.rank, reason_of(error))
        return None


def open_catalog(context: LeaderContext) -> Catalog | None:
    """None, with the reason in the log, when not all ranks have opened the same cache of the bucket."""
    opened = context.opened(objects.TIER.name)
    if not opened or context.cache is None:
        return None  # the rank without a store has logged the reason
    config = context.config
    try:
        clients: list[Client] = []
        for rank in range(len(context.hellos)):
            settings = settings_for(config, rank)
            same = next((client for client in clients if client.settings == settings), None)
            clients.append(same or Client(settings, "object store (leader)"))
    except Exception as error:
        logger.warning("there is no object store tier: %s", reason_of(error))
        return None
    names = Names(context.cache, config.object_encryption_secret)
    if {tier.store for tier in opened} != {names.root}:
        logger.warning(
            "there is no object store tier: the ranks compute different caches. Give all ranks the same model, "
            "settings and KVBM release"
        )
        return None
    bits = group_bits(min(hello.block_bytes for hello in context.hellos))
    # A test that injects faults measures nothing.
    has_answered = bool(config.inject_faults) or all(tier.rate for tier in opened)
    presence = Presence(clients, names, bits, lookup_seconds=config.object_lookup_secs, has_answered=has_answered)
    keeper = Keeper(clients, names, config.object_num_blocks) if config.object_num_blocks else None
    logger.info(
        "object store tier: bucket %s at %s, %d block(s) an object, %s, %s",
        clients[0].settings.bucket, clients[0].settings.endpoint or "AWS", 1 << bits,
        "encrypted" if config.object_encryption_secret else "not encrypted", statement(config.object_num_blocks),
    )  # fmt: skip
    return ObjectCatalog(clients, presence, keeper, max(hello.block_bytes for hello in context.hellos))
