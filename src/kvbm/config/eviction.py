"""The settings of eviction: which blocks stay in a full tier."""

from typing import Annotated, Literal

import msgspec

from kvbm.config.kinds import Choice, Shares
from kvbm.config.setting import DISK, HOST, Setting

Policy = Literal["lru", "session", "arc", "s3fifo"]
_POLICY = Choice(words=("lru", "session", "arc", "s3fifo"))


class EvictionSettings(msgspec.Struct, frozen=True, kw_only=True):
    # fmt: off
    host_policy: Annotated[Policy, Setting(
        "KVBM_HOST_POLICY", HOST, _POLICY,
        "Which block the host tier evicts when it is full. session learns when conversations go on (docs/policies.md).",
    )] = "lru"
    tenant_shares: Annotated[str, Setting(
        "KVBM_TENANT_SHARES", HOST, Shares(example="acme=0.3,beta=0.2"),
        "Parts of the host tier, and of the disk tier, that belong to tenants. A tenant is the cache salt of its "
        "requests. In a full tier no other request evicts blocks within its share (docs/policies.md).",
    )] = ""
    disk_policy: Annotated[Policy, Setting(
        "KVBM_DISK_POLICY", DISK, _POLICY,
        "Which block the disk tier evicts when it is full; see KVBM_HOST_POLICY.",
    )] = "lru"
    # fmt: on

    @property
    def tenants(self) -> dict[str, float]:
        """The share of each tenant, by its cache salt."""
        return Shares.split(self.tenant_shares)
