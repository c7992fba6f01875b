"""Sizes of the tiers: at least one tier must have a size, and a size in GB becomes a number of slots."""

from kvbm.config.kinds import ConfigError
from kvbm.config.table import Config


def require_tier(config: Config) -> None:
    """Raise `ConfigError` when no tier is configured. The leader calls it at start."""
    if not config.has_host_tier and not config.has_disk_tier:
        raise ConfigError(
            "At least one cache tier must be configured, and both have size 0: set DYN_KVBM_CPU_CACHE_GB or "
            "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS for the host tier, DYN_KVBM_DISK_CACHE_GB or "
            "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS for the disk tier, for example DYN_KVBM_CPU_CACHE_GB=20"
        )


def slots_for(gb: float, override: int, bytes_per_block_all_ranks: int) -> int:
    """Return the number of slots of a tier of `gb` (1e9 bytes each), or `override` when it is not 0.

    A slot has the same number on every rank, so a block takes the sum of its bytes on all ranks.
    """
    if override > 0:
        return override
    if bytes_per_block_all_ranks <= 0:
        raise ValueError(f"a block must have at least one byte, got {bytes_per_block_all_ranks}")
    return int(gb * 1e9 / bytes_per_block_all_ranks)
