"""Shares of a tier for tenants: each has a policy of its own, and none evicts from the share of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvbm.core.keys import Key
from kvbm.core.policy.base import COMMON, EvictionPolicy, Slots, Turn

_FREE = -1


class Shares(EvictionPolicy):
    """A tenant may use every slot that is free. In a full tier, a tenant within its share takes room from the tenant
    that is furthest above its own; a tenant at its share or above makes room among its own blocks. Blocks that are
    being written or read count as well.

    ``shares[tenant]``: the part of the slots. What is left belongs to the common tenant.
    """

    def __init__(self, size: int, shares: Mapping[int, float], make: Callable[[int], EvictionPolicy]) -> None:
        left = 1.0 - sum(shares.values())
        if left < -1e-9 or any(share <= 0 for share in shares.values()) or COMMON in shares:
            raise ValueError(f"shares of tenants must be above 0 and add up to at most 1, got {dict(shares)}")
        self._policies = {tenant: make(size) for tenant in (COMMON, *shares)}
        self._quota = {tenant: int(part * size) for tenant, part in ((COMMON, max(left, 0.0)), *shares.items())}
        self._held = dict.fromkeys(self._policies, 0)  # slots with a block of the tenant
        self._promised = dict.fromkeys(self._policies, 0)  # slots evicted for the tenant and not assigned yet
        self._tenant = np.full(size, _FREE, np.int32)

    def assigned(self, slots: Sequence[int], tenants: Sequence[int] | None) -> None:
        some = np.asarray(slots, np.intp)
        self._promised = dict.fromkeys(self._policies, 0)
        if tenants is None:
            self._tenant[some] = COMMON
        else:
            self._tenant[some] = [tenant if tenant in self._policies else COMMON for tenant in tenants]
        self._count(some, 1)

    def freed(self, slots: Slots) -> None:
        for policy, mine in self._split(slots):
            policy.freed(mine)
        self._set_free(np.asarray(slots, np.intp))

    def _set_free(self, slots: np.ndarray) -> None:
        self._count(slots, -1)
        self._tenant[slots] = _FREE

    def _count(self, slots: np.ndarray, change: int) -> None:
        owners = self._tenant[slots]
        for tenant in self._policies:
            self._held[tenant] += change * int(np.count_nonzero(owners == tenant))

    def tenants_of(self, slots: Sequence[int]) -> Sequence[int]:
        tenants: list[int] = self._tenant[list(slots)].tolist()
        return tenants

    def inserted(self, slots: Slots, keys: Sequence[Key]) -> None:
        some = np.asarray(slots, np.intp)
        if (self._tenant[some] == _FREE).any():  # of an earlier engine, or evicted a moment ago
            free = some[self._tenant[some] == _FREE]
            self._tenant[free] = COMMON
            self._count(free, 1)
        owners = self._tenant[some]
        for tenant, policy in self._policies.items():
            mine = np.flatnonzero(owners == tenant)
            if len(mine):
                policy.inserted(some[mine], [keys[i] for i in mine.tolist()])

    def _split(self, slots: Slots) -> list[tuple[EvictionPolicy, np.ndarray]]:
        some = np.asarray(slots, np.intp)
        owners = self._tenant[some]
        parts = [(policy, some[owners == tenant]) for tenant, policy in self._policies.items()]
        return [(policy, mine) for policy, mine in parts if len(mine)]

    def hit(self, slots: Slots) -> None:
        for policy, mine in self._split(slots):
            policy.hit(mine)

    def turned(self, keys: Sequence[Key], slots: np.ndarray, idle: np.ndarray, turn: Turn) -> None:
        found = slots[slots >= 0]
        tenant = int(self._tenant[found[0]]) if len(found) else COMMON
        mine = np.where((slots >= 0) & (self._tenant[slots] == tenant), slots, -1)
        self._policies[tenant].turned(keys, mine, idle[self._tenant[idle] == tenant], turn)

    def pinned(self, slots: Slots) -> None:
        for policy, mine in self._checked(slots):
            policy.pinned(mine)

    def _checked(self, slots: Slots) -> list[tuple[EvictionPolicy, np.ndarray]]:
        parts = self._split(slots)
        some = np.asarray(slots, np.intp).tolist()
        known = sum(len(mine) for _, mine in parts) == len(some)
        # The policy of the only tenant checks for itself.
        if not known or (len(parts) > 1 and (len(set(some)) < len(some) or not all(slot in self for slot in some))):
            raise KeyError("a slot that is not there, or is named twice")
        return parts

    def released(self, slots: Slots, used: bool) -> None:
        for policy, mine in self._split(slots):
            policy.released(mine, used)

    def dropped(self, slots: Slots) -> None:
        for policy, mine in self._checked(slots):
            policy.dropped(mine)
        self._set_free(np.asarray(slots, np.intp))

    def evict(self) -> int:
        return self.evict_run(1)[0]

    def evict_run(self, count: int, tenant: int = COMMON) -> list[int]:
        tenant = tenant if tenant in self._policies else COMMON
        own = self._policies[tenant]
        left = self._quota[tenant] - self._held[tenant] - self._promised[tenant]
        over = {
            other: self._held[other] - self._quota[other]
            for other, policy in self._policies.items()
            if policy and other != tenant and self._held[other] > self._quota[other]
        }
        if own and (left <= 0 or not over):
            run = own.evict_run(count)
        elif over:
            victim = max(over, key=over.__getitem__)
            run = self._policies[victim].evict_run(min(count, over[victim], max(left, 1)))
        else:  # nothing is above its share: for a staging buffer only
            run = next((policy.evict_run(1) for policy in self._policies.values() if policy), [])
            if not run:
                raise KeyError("no slot may be evicted")
        self._set_free(np.array(run, np.intp))
        self._promised[tenant] += len(run)
        return run

    def room_for(self, tenant: int) -> int:
        tenant = tenant if tenant in self._policies else COMMON
        above = (
            min(len(policy), max(0, self._held[other] - self._quota[other]))
            for other, policy in self._policies.items()
            if other != tenant
        )
        return len(self._policies[tenant]) + sum(above)

    def __len__(self) -> int:
        return sum(map(len, self._policies.values()))

    def __contains__(self, slot: object) -> bool:
        return any(slot in policy for policy in self._policies.values())
