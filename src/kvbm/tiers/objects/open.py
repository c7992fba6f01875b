"""Opening the object store tier: a rank's store, and the leader's catalog."""

from __future__ import annotations

import logging

from kvbm.core.catalog import Catalog
from kvbm.tiers import objects
from kvbm.tiers.base import LeaderContext, RankContext, Store
from kvbm.tiers.bounded import Call, reason_of
from kvbm.tiers.objects.capacity import Keeper, statement
from kvbm.tiers.objects.catalog import ObjectCatalog
from kvbm.tiers.objects.client import Client, ObjectStoreError
from kvbm.tiers.objects.format import Codec, Names, group_bits
from kvbm.tiers.objects.presence import Presence
from kvbm.tiers.objects.settings import settings_for
from kvbm.tiers.objects.store import ObjectStore, describe_cache

logger = logging.getLogger("kvbm")


def open_store(context: RankContext) -> Call[Store | None] | None:
    """This rank's store. A store that does not answer now is opened all the same: it is used once it answers."""
    if context.cache is None:
        if context.rank == 0:
            logger.warning("there is no object store tier: this engine has no fingerprint of its weights")
        return None
    return Call(lambda: _open_store(context), "object store", lambda store: store.close() if store else None)


def _open_store(context: RankContext) -> Store | None:
    assert context.cache is not None
    try:
        settings = settings_for(context.config, context.rank)
        client = Client(settings, f"object store (rank {context.rank})")
        names = Names(context.cache, settings.encryption_secret)
        codec = Codec(names.scope, settings.encryption_secret)
        store = ObjectStore(client, names, codec, context.rank, context.slot_bytes)
    except Exception as error:
        logger.warning("rank %d goes on without an object store: %s", context.rank, reason_of(error))
        return None
    try:
        client.check()
        if context.rank == 0:  # for `kvbm cache list`
            describe_cache(client, names, context.cache, context.ranks, context.slot_bytes)
    except ObjectStoreError as error:
        client.suspend(str(error))
    return store


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
    presence = Presence(clients, names, bits, lookup_seconds=config.object_lookup_secs)
    keeper = Keeper(clients, names, config.object_num_blocks) if config.object_num_blocks else None
    logger.info(
        "object store tier: bucket %s at %s, %d block(s) an object, %s, %s",
        clients[0].settings.bucket, clients[0].settings.endpoint or "AWS", 1 << bits,
        "encrypted" if config.object_encryption_secret else "not encrypted", statement(config.object_num_blocks),
    )  # fmt: skip
    return ObjectCatalog(clients, presence, keeper)
