"""Opening a rank's host memory: new, or that of the last engine."""

from __future__ import annotations

import logging
from pathlib import Path

from kvbm.tiers import host
from kvbm.tiers.base import RankContext
from kvbm.tiers.bounded import Call, reason_of
from kvbm.tiers.directory import private_directory
from kvbm.tiers.disk.cache_dir import cache_directory, slab_path
from kvbm.tiers.host.persistent_slab import DIRECTORY_SETTING, PersistentSlab, rows_of
from kvbm.tiers.host.shared import MappableSlab
from kvbm.tiers.host.slab import HostMemoryError, HostSlab, available_memory
from kvbm.tiers.lock import PATIENCE_SECONDS

logger = logging.getLogger("kvbm")


def open_slab(context: RankContext, slots: int, may_persist: bool) -> HostSlab:
    slab = _open_persistent(context, slots, may_persist) if host.TIER.outlives_engine(context.config) else None
    if slab is None and context.shares_near_memory:
        return MappableSlab(slots * context.slot_bytes, host.TIER.node(context))
    return slab or HostSlab(slots * context.slot_bytes, node=host.TIER.node(context))


def carve(context: RankContext, slab: HostSlab) -> HostSlab:
    """Each rank has found room for its own share of persistent memory, and there may not be room for all of them."""
    slots = slab.size // context.slot_bytes
    try:
        return slab.carve(slots, context.slot_bytes)
    except OSError as error:
        if not slab.outlives_engine:
            raise
        logger.warning(
            "rank %d: this engine's host tier will not survive a restart: %s", context.rank, error.strerror or error
        )
        slab.give_up()
    return HostSlab(slots * context.slot_bytes, node=host.TIER.node(context)).carve(slots, context.slot_bytes)


def _open_persistent(context: RankContext, slots: int, may_persist: bool) -> PersistentSlab | None:
    """The memory of the last engine, or memory that the next one will find; None when it ends with this one."""
    if not may_persist or context.cache is None:
        if context.rank == 0:
            logger.warning("KVBM_HOST_PERSIST has no effect here: with this engine the host tier ends with it")
        return None
    directory = cache_directory(context.config.host_persist_dir, context.cache)
    try:
        return Call(lambda: _open(context, directory, slots), str(directory), PersistentSlab.close).result()
    except HostMemoryError:  # a setting that can never be met
        raise
    except Exception as error:
        logger.warning(
            "rank %d: this engine's host tier will not survive a restart: %s. Blocks saved by the previous engine "
            "are untouched",
            context.rank, reason_of(error),
        )  # fmt: skip
        return None


def _open(context: RankContext, directory: Path, slots: int) -> PersistentSlab:
    """Raises OSError when the slab or its index cannot be used now."""
    private_directory(directory, DIRECTORY_SETTING)
    path, slot_bytes = slab_path(directory, context.rank), context.slot_bytes
    slab = PersistentSlab(path, slots, slot_bytes, node=host.TIER.node(context), patience=PATIENCE_SECONDS)
    try:
        slab.rows = rows_of(directory)
    except OSError as error:
        # Stores of this engine would overwrite blocks that a later engine can find. Without room for a second slab
        # they have to: the memory is what this engine runs with.
        if slots * slot_bytes < available_memory() * 0.9:
            slab.close()
            raise
        logger.warning(
            "rank %d: blocks of the last engine are lost: %s, and there is no memory for a second host tier",
            context.rank, error.strerror or error,
        )  # fmt: skip
    except BaseException:
        slab.close()
        raise
    return slab
