"""What can be seen of the backend on one rank: how often pages were asked for and found, and what became of them.

SGLang's own memory is the *device* here: what it is asked for, it has not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from kvbm.core.catalog import Catalog
from kvbm.core.counts import Counts
from kvbm.observe.requests import LOADED, NOT_FOUND
from kvbm.observe.snapshot import DEVICE, Flow, HitRates, Identity, Saved, Snapshot, TierState
from kvbm.observe.source import kinds
from kvbm.plans import TierName
from kvbm.tiers.registry import NEAR


class Lookups:
    """Questions and answers. Told by the thread that asks, read by any."""

    def __init__(self, latest: int) -> None:
        self.asked = self.pages = self.found = 0
        self._latest: deque[tuple[int, dict[TierName, int]]] = deque(maxlen=max(1, latest))

    def add(self, pages: int, found: dict[TierName, int]) -> None:
        self.asked += 1
        self.pages += pages
        self.found += bool(found)
        self._latest.append((pages, found))

    def rates(self) -> HitRates:
        latest = list(self._latest)
        hits: dict[str, int] = {}
        for _, found in latest:
            for tier, pages in found.items():
                hits[tier] = hits.get(tier, 0) + pages
        return HitRates(requests=len(latest), blocks=sum(pages for pages, _ in latest), hits=hits)


class Observed(Protocol):
    """Of a store, what is looked at."""

    counts: Counts
    lookups: Lookups

    @property
    def tiers(self) -> Mapping[TierName, Catalog]: ...


class StoreSource:
    """Makes snapshots of a store; see :mod:`kvbm.observe.snapshot`."""

    def __init__(self, identity: Identity, store: Observed, failures: Callable[[], Mapping[str, int]]) -> None:
        self.identity = identity
        self.started = time.time()
        self._store = store
        self._failures = failures

    def snapshot(self, requests: int = 0) -> Snapshot:
        counts, lookups = self._store.counts, self._store.lookups
        matched = dict(counts.matched_blocks)
        return Snapshot(
            at=time.time(),
            started=self.started,
            identity=self.identity,
            tiers=[_state(tier, pool, self.identity.block_bytes) for tier, pool in self._store.tiers.items()],
            flows=list(self._flows(counts)),
            lookups=lookups.asked,
            looked_up_blocks=lookups.pages,
            matched_tokens=sum(matched.values()) * self.identity.block_tokens,
            matched_blocks=matched,
            hit_rates=lookups.rates(),
            refused_blocks={},
            refused_loads={},
            outcomes={LOADED: lookups.found, NOT_FOUND: lookups.asked - lookups.found},
            missed={},
            failures=kinds(self._failures()),
            saved=Saved(),
        )

    def _flows(self, counts: Counts) -> Iterator[Flow]:
        size, tiers = self.identity.block_bytes, self._store.tiers
        above = NEAR.name if NEAR.name in tiers else DEVICE
        for tier in tiers:
            if tier == NEAR.name:
                kept = counts.offloaded_blocks
                yield Flow(source=DEVICE, target=tier, blocks=kept, bytes=kept * size)
            else:
                kept, failed = counts.moved_blocks.get(tier, 0), counts.failed_move_blocks.get(tier, 0)
                yield Flow(source=above, target=tier, blocks=kept, bytes=kept * size, failed_blocks=failed)
        for tier, pages in dict(counts.onboarded_blocks).items():
            # Copies from the near tier do not fail.
            failed = counts.failed_load_blocks if tier != NEAR.name else 0
            yield Flow(source=tier, target=DEVICE, blocks=pages, bytes=pages * size, failed_blocks=failed)


def _state(tier: TierName, pool: Catalog, size: int) -> TierState:
    free, writing, pinned = pool.free, pool.writing, pool.pinned
    return TierState(
        tier=tier,
        slots=pool.size,
        free=free,
        writing=writing,
        idle=max(0, pool.size - free - writing - pinned),
        pinned=pinned,
        block_bytes=size,
        evictions=pool.evictions,
    )
