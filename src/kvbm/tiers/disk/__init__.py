"""A local disk: blocks in one file a rank, which the next engine finds again."""

from kvbm.core.rate import Rate
from kvbm.plans import DEVICE
from kvbm.tiers import host
from kvbm.tiers.base import Tier

TIER = Tier(
    name="disk",
    level="g3",
    medium="STORAGE",
    prior=Rate(5e9, 0.002),
    size_setting="DYN_KVBM_DISK_CACHE_GB",
    persistent=True,
    advice="put DYN_KVBM_DISK_CACHE_DIR on local NVMe",
    offload_metrics={"h2d": host.TIER.name, "d2d": DEVICE},
    onboard_metric="d2d",
)
