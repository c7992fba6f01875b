"""The books of a host tier that outlives the engine: which slot holds which block, where the next leader finds it.

A block is entered when its store is published. The ranks have hashed it by then, and record their checksums when the
next plan tells them that it was good (:mod:`kvbm.tiers.host.persistent_slab`): a store that a failed load has tainted
never has a checksum, so not even an index that is out of date can find it.

At start a rank reports which slots hold the block that the index names, and a digest of the rows that it compared.
The leader drops all other rows before the first lookup. It adopts no block if a digest differs from its own.
"""

from __future__ import annotations

import logging

import numpy as np

from kvbm.core.pool import Pool
from kvbm.tiers import host
from kvbm.tiers.base import Fingerprint, LeaderContext
from kvbm.tiers.bounded import Call, reason_of
from kvbm.tiers.disk.cache_dir import cache_directory
from kvbm.tiers.disk.index import Index
from kvbm.tiers.host.persistent_slab import DIRECTORY_SETTING, digest, rows_of
from kvbm.tiers.lock import PATIENCE_SECONDS

logger = logging.getLogger("kvbm")


def open_pool(context: LeaderContext) -> Pool:
    """The near tier's pool, with the blocks of the last engine where the ranks have kept them."""
    slots = min(tier.slots for tier in context.opened(host.TIER.name))
    if host.TIER.outlives_engine(context.config) and context.cache is not None:
        pool = host.TIER.make_pool(context.config, slots, context.clock)
        if adopt(context, context.cache, pool):
            return pool
    return host.TIER.make_pool(context.config, slots, context.clock)


def adopt(context: LeaderContext, cache: Fingerprint, pool: Pool) -> bool:
    """Take over the blocks of the last engine, and journal those of this one. False, with the reason in the log, when
    host memory ends with this engine."""
    near = context.opened(host.TIER.name)
    if not all(tier.intact for tier in near):
        return False  # a rank that does not keep its memory has logged the reason
    directory = cache_directory(context.config.host_persist_dir, cache)
    about = {"ranks": len(near), "block_bytes": context.block_bytes}
    index: Index | None = None
    try:
        rows = Call(lambda: rows_of(directory), str(directory)).result()
        if any(tier.index != digest(directory, rows, tier.slots) for tier in near):
            logger.warning(
                "the host tier is not persistent: a rank has compared its memory with another index than that in %s: "
                "the ranks do not see the same directory",
                directory,
            )
            return False
        opening = Call(
            lambda: Index.open(
                directory,
                cache,
                pool.size,
                patience=PATIENCE_SECONDS,
                about=about,
                what="host tier",
                setting=DIRECTORY_SETTING,
            ),
            str(directory),
            Index.close,
        )
        index = opening.result()
        # The stages of a pipeline may have room for more slots than are used: those that all have count.
        bits = [np.unpackbits(np.frombuffer(tier.intact, np.uint8), count=pool.size) for tier in near]
        whole = np.logical_and.reduce(bits)
        compared = {(key, slot) for slot, key in rows if slot < pool.size and whole[slot]}
        entries = list(index.entries())
        lost = [entry[0] for entry in entries if entry not in compared]
        index.remove(lost)
        found = pool.adopt(entry for entry in entries if entry in compared)
    except Exception as error:
        logger.warning("the host tier is not persistent: %s", reason_of(error))
        if index is not None:
            index.close()
        return False
    logger.info(
        "host tier: %d of %d blocks are there from before, %d were not whole, in %s",
        found, pool.size, len(lost), directory,
    )  # fmt: skip
    pool.journal = index
    return True
