"""Opening the disk tier: a rank's file, and the leader's catalog over the index of all ranks."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from kvbm.config import Config
from kvbm.core.catalog import Catalog, Journal
from kvbm.testing.disk_faults import disk_io
from kvbm.tiers import disk
from kvbm.tiers.base import LeaderContext, RankContext, Store
from kvbm.tiers.bounded import Call, DiskHangs, reason_of
from kvbm.tiers.directory import SETTING, CacheRefused, private_directory
from kvbm.tiers.disk import gds
from kvbm.tiers.disk.cache_dir import cache_directory, slab_path
from kvbm.tiers.disk.file import DiskFile, DiskSpaceError
from kvbm.tiers.disk.index import Index
from kvbm.tiers.disk.shared import MappedIndex, SharedCatalog, SharedFile
from kvbm.tiers.lock import PATIENCE_SECONDS

logger = logging.getLogger("kvbm")

# Staging slots where the user asked for no host tier.
_MIN_STAGING_SLOTS = 8
# The directory cannot be used until an administrator or the user changes something. Other errors may pass.
_UNUSABLE = (errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


class DiskDirectoryError(OSError):
    """The directory of the settings can never hold this cache; the text says why and what to do."""


def open_file(config: Config, path: Path, slots: int, slot_bytes: int, rank: int, patience: float) -> DiskFile:
    """A rank's file as the settings want it. ``patience``: seconds to wait for a process that still holds it."""
    return DiskFile(
        path,
        slots,
        slot_bytes,
        allocator=config.disk_allocator_type,
        direct=not config.disk_disable_o_direct,
        zerofill=config.disk_zerofill_fallback,
        threads=config.disk_threads,
        patience=patience,
        io=disk_io(config.inject_faults, rank),
        stall_seconds=config.disk_load_timeout_secs,
    )


def staging_slots(config: Config, slot_bytes: int) -> int:
    """Near slots to stage blocks through, where the user asked for no host tier."""
    return max(_MIN_STAGING_SLOTS, (config.disk_bounce_mb << 20) // slot_bytes)


def open_store(context: RankContext) -> Call[Store | None] | None:
    """This rank's file, made in the background. Its result is None when the disk cannot be used now, and it raises
    :class:`DiskSpaceError` or :class:`DiskDirectoryError` when the settings can never be met."""
    config = context.config
    if context.cache is None:
        if not config.has_host_tier:
            raise ValueError("there is no disk tier for this engine yet: set DYN_KVBM_CPU_CACHE_GB")
        if context.rank == 0:
            logger.warning("there is no disk tier for this engine yet: DYN_KVBM_DISK_CACHE_GB has no effect")
        return None
    directory = cache_directory(config.disk_cache_dir, context.cache)
    if context.access == "reader":
        return Call(lambda: SharedFile(config, directory, context.slot_bytes), str(directory), _close)
    slots = context.slots_for("DYN_KVBM_DISK_CACHE_GB", config.disk_cache_gb, config.disk_cache_override_num_blocks)
    if context.rank == 0 and context.device.startswith("cuda"):
        logger.info("GPUDirect Storage: %s", gds.statement())
    return Call(lambda: _open_file(context, directory, slots), str(directory), _close)


def _open_file(context: RankContext, directory: Path, slots: int) -> Store | None:
    try:
        _make_directory(context.config, directory)
        path = slab_path(directory, context.rank)
        return open_file(context.config, path, slots, context.slot_bytes, context.rank, PATIENCE_SECONDS)
    except (DiskSpaceError, DiskDirectoryError, DiskHangs):  # the caller has given up a call that hangs, and logged it
        raise
    except Exception as error:
        logger.warning(
            "rank %d goes on without a disk tier: %s. Blocks on disk are kept for the next start",
            context.rank, reason_of(error),
        )  # fmt: skip
        return None


def _make_directory(config: Config, directory: Path) -> None:
    try:
        private_directory(directory)
    except OSError as error:
        if not isinstance(error, CacheRefused) and error.errno not in _UNUSABLE:
            raise
        reason, place = error.strerror or str(error), f"{SETTING}={config.disk_cache_dir}"
        cure = "" if isinstance(error, CacheRefused) else f". Set {SETTING} to a directory on a local drive"
        raise DiskDirectoryError(error.errno, f"{place} cannot be used: {reason}{cure}") from error


def _close(file: Store | None) -> None:
    if file is not None:
        file.close()


def open_catalog(context: LeaderContext) -> Catalog | None:
    """The pool over the index of the last engine. None, with the reason in the log, when there is no disk that all
    ranks can use."""
    opened = context.opened(disk.TIER.name)
    if not opened or context.cache is None:
        return None  # the rank without a file, or the engine without a fingerprint, has logged the reason
    directory = cache_directory(context.config.disk_cache_dir, context.cache)
    if context.access == "reader":
        return SharedCatalog(directory)
    slots = min(tier.slots for tier in opened)
    if others := {tier.store for tier in opened} - {directory.name}:
        logger.warning(
            "disk tier off: the ranks compute different cache directories (leader %s, ranks %s). Give all ranks "
            "the same model, settings and KVBM release",
            directory.name, ", ".join(sorted(others)),
        )  # fmt: skip
        return None
    cache, about = context.cache, {"ranks": len(context.hellos), "block_bytes": context.block_bytes}

    def open_journal() -> tuple[Index, Journal]:
        index = Index.open(directory, cache, slots, patience=PATIENCE_SECONDS, about=about)
        return index, MappedIndex.over(index, slots) if context.access == "writer" else index

    try:
        index, journal = Call(open_journal, str(directory), lambda opened: opened[1].close()).result()
    except Exception as error:
        logger.warning(
            "there is no disk tier: %s. This engine runs without it; blocks on disk are kept for the next start",
            reason_of(error),
        )
        return None
    pool = disk.TIER.make_pool(context.config, slots, context.clock, journal)
    found = pool.adopt(index.entries())
    logger.info("disk tier: %d of %d blocks are there from before, in %s", found, slots, directory)
    return pool
