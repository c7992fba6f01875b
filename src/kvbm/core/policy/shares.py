"""Shares of a tier for tenants: each has a policy of its own, and none evicts from the share of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvbm.core.keys import Key
from kvbm.core.policy.base import COMMON, EvictionPolicy, Slots, Turn


class Shares(EvictionPolicy):
    """A tenant may use every slot that is free. In a full tier, a tenant within its share takes room from the tenant
    that is furthest above its own; a tenant at its share or above makes room among its own blocks.

    ``shares[tenant]``: the part of the slots. What is left belongs to the common tenant.
    """

    def __init__(self, size: int, shares: Mapping[int, float], make: Callable[[int], EvictionPolicy]) -> None:
        left = 1.0 - sum(shares.values())
        if left < -1e-9 or any(share <= 0 for share in shares.values()) or COMMON in shares:
            raise ValueError(f"shares of tenants must be above 0 and add up to at most 1, got {dict(shares)}")
        self._policies = {COMMON: make(size), **{tenant: make(size) for tenant in shares}}
        self._quota = {COMMON: max(left, 0.0) * size, **{tenant: share * size for tenant, share in shares.items()}}
        self._tenant = np.zeros(size, np.int32)

    def assigned(self, slots: Sequence[int], tenants: Sequence[int]) -> None:
        self._tenant[list(slots)] = [tenant if tenant in self._policies else COMMON for tenant in tenants]

    def tenants_of(self, slots: Sequence[int]) -> Sequence[int]:
        tenants: list[int] = self._tenant[list(slots)].tolist()
        return tenants

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        owners = self._tenant[np.asarray(slots, np.int32)]
        for tenant, policy in self._policies.items():
            mine = np.flatnonzero(owners == tenant)
            if len(mine):
                policy.inserted(np.asarray(slots, np.int32)[mine], [keys[i] for i in mine.tolist()])

    def _split(self, slots: Slots) -> list[tuple[EvictionPolicy, np.ndarray]]:
        some = np.asarray(slots, np.int32)
        owners = self._tenant[some]
        return [(policy, some[owners == tenant]) for tenant, policy in self._policies.items()]

    def hit(self, slots: Slots) -> None:
        for policy, mine in self._split(slots):
            policy.hit(mine)

    def turned(self, keys: Sequence[Key], slots: np.ndarray, turn: Turn) -> None:
        found = slots[slots >= 0]
        tenant = int(self._tenant[found[0]]) if len(found) else COMMON
        mine = np.where((slots >= 0) & (self._tenant[slots] == tenant), slots, -1)
        self._policies[tenant].turned(keys, mine, turn)

    def pinned(self, slots: Slots) -> None:
        some = np.asarray(slots, np.int32).tolist()
        if len(set(some)) < len(some) or not all(slot in self for slot in some):
            raise KeyError("a slot that is not there, or is named twice")
        for policy, mine in self._split(slots):
            policy.pinned(mine)

    def released(self, slots: Slots, used: bool) -> None:
        for policy, mine in self._split(slots):
            policy.released(mine, used)

    def dropped(self, slots: Slots) -> None:
        for policy, mine in self._split(slots):
            policy.dropped(mine)
        self._tenant[np.asarray(slots, np.int32)] = COMMON

    def evict(self) -> int:
        return self.evict_for(COMMON)

    def evict_for(self, tenant: int) -> int:
        tenant = tenant if tenant in self._policies else COMMON
        over = {other: len(policy) - self._quota[other] for other, policy in self._policies.items() if len(policy)}
        if not over:
            raise KeyError("no slot may be evicted")
        victim = tenant if over.get(tenant, -1.0) >= 0 else max(over, key=over.__getitem__)
        slot = self._policies[victim].evict()
        self._tenant[slot] = COMMON
        return slot

    def __len__(self) -> int:
        return sum(map(len, self._policies.values()))

    def __contains__(self, slot: object) -> bool:
        return any(slot in policy for policy in self._policies.values())
