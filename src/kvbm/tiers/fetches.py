"""Fetches: blocks of remote tiers on their way to the near tier while their request waits in the engine's queue.

A network answers late, and a queue is the time to wait for it. The store reads straight into near slots. By the time
the engine asks for the request, its blocks are in the near tier or about to come. Fetches hold at most a part of the
near tier, so they cannot evict what running requests use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbm.core.breaker import Breaker
from kvbm.core.counts import Counts, add
from kvbm.core.manager import BlockManager
from kvbm.core.match import Match
from kvbm.core.policy import COMMON
from kvbm.plans import MovePlan, MoveResult, TierName
from kvbm.tiers.edges import Move

MAX_SHARE = 4  # of the near tier: one in so many slots is filled ahead at a time


class Fetches:
    """Part of the leader: called from its thread, never waits. ``observe`` hears how long a tier took for which
    places."""

    def __init__(
        self,
        manager: BlockManager,
        ranks: int,
        counts: Counts,
        breakers: dict[TierName, Breaker],
        observe: Callable[[TierName, Sequence[int], float], None],
    ) -> None:
        self._manager = manager
        self._ranks = ranks
        self._counts = counts
        self._breakers = breakers
        self._observe = observe
        self._fetches: dict[int, Move] = {}
        self._due: list[MovePlan] = []
        self.pending_blocks = 0
        self.max_blocks = manager.near.size // MAX_SHARE

    def start(self, match: Match, tenant: int = COMMON) -> int:
        """Begin to fetch the blocks of a match that lie in remote tiers; returns how many."""
        self._manager.clock.tick()
        plans = self._manager.fetch(match, self.max_blocks - self.pending_blocks, tenant)
        for plan in plans:
            self._fetches[plan.id] = Move(plan, set(range(self._ranks)))
            self.pending_blocks += len(plan.slots)
        self._due += plans
        return sum(len(plan.slots) for plan in plans)

    def take_due(self) -> list[MovePlan]:
        """Plans for the next step; every rank must get them."""
        due, self._due = self._due, []
        return due

    def end(self, rank: int, result: MoveResult, now: float) -> None:
        """A rank has read its part, or failed to. Ignores moves that are no fetches."""
        fetch = self._fetches.get(result.id)
        if fetch is None or not fetch.ends(rank, result):
            return
        del self._fetches[result.id]
        tier, blocks = fetch.plan.source, len(fetch.plan.slots)
        self.pending_blocks -= blocks
        add(self._counts.failed_fetch_blocks, tier, len(fetch.bad))
        if len(fetch.bad) == blocks:
            self._breakers[tier].failed(now)
        else:
            self._breakers[tier].succeeded()
        if not fetch.bad and fetch.seconds:
            self._observe(tier, fetch.plan.slots, fetch.seconds)
        add(self._counts.fetched_blocks, tier, self._manager.finish_fetch(result.id, fetch.bad))

    def fail_rank(self, rank: int, now: float) -> None:
        for plan_id, fetch in list(self._fetches.items()):
            self.end(rank, MoveResult(plan_id, list(range(len(fetch.plan.slots)))), now)

    @property
    def under_way(self) -> bool:
        return bool(self._fetches)
