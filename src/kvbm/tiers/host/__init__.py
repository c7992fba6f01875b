"""Host memory: the near tier. The copier moves blocks between its slots and the engine's cache."""

from kvbm.core.rate import Rate
from kvbm.plans import DEVICE
from kvbm.tiers.base import Tier

TIER = Tier(
    name="host",
    level="g2",
    medium="CPU",
    prior=Rate(20e9, 0.0005),
    size_setting="DYN_KVBM_CPU_CACHE_GB",
    staged=False,
    offload_metrics={"d2h": DEVICE},
    onboard_metric="h2d",
)
