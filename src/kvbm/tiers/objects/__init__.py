"""An object store: declared, so that its metrics and settings have a place. No engine opens it yet."""

from kvbm.core.rate import Rate
from kvbm.tiers.base import Tier

TIER = Tier(
    name="object",
    level="g4",
    medium="EXTERNAL",
    prior=Rate(1e9, 0.05),
    size_setting="DYN_KVBM_OBJECT_NUM_BLOCKS",
    keyed=True,
    persistent=True,
    shared=True,
    offload_metrics={"d2o": ""},
    onboard_metric="o2d",
    counts_failures=True,
)
