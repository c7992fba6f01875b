"""What goes on from host memory to disk, and what is known to lie there.

A block is written through: it becomes a candidate when it has come to host memory, or when it was found again, as soon
as the filter lets it pass. Every step takes candidates as far as the limit on what may be under way allows. The rest
waits, up to ``max_pending_blocks``; beyond that blocks are passed over, and get their chance when they are found again.
A block that waits is not pinned: host memory may evict it before its turn. So a slow disk costs disk hits: it never
holds an engine block, and never more than half of host memory.

A block is published on disk, and entered into the index that outlives the engine, when every rank has written it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager
from kvbm.core.policy.admission import FrequencyFilter
from kvbm.plans import SpillPlan, SpillResult, Tier
from kvbm.runtime.counts import Counts
from kvbm.storage.index import Index


class _Flight:
    """A spill on its way."""

    __slots__ = ("bad", "plan", "ranks", "seconds")

    def __init__(self, plan: SpillPlan, ranks: int) -> None:
        self.plan = plan
        self.ranks = set(range(ranks))
        self.bad: set[int] = set()
        self.seconds = 0.0


class Spills:
    """Part of the leader: called from its thread, never waits. Without a ``filter`` everything goes to disk."""

    def __init__(
        self,
        manager: BlockManager,
        ranks: int,
        counts: Counts,
        *,
        filter: FrequencyFilter | None = None,
        index: Index | None = None,
        max_pending_blocks: int = 1024,
        block_bytes: int = 0,
        bypass: bool = False,
    ) -> None:
        """``bypass``: there is no host tier, blocks only pass through host memory on their way."""
        self.bypass = bypass
        self._manager = manager
        self._ranks = ranks
        self._counts = counts
        self._filter = filter
        self._index = index
        self._block_bytes = block_bytes  # of all ranks together
        host = next(iter(manager.pools.values()))
        self._max_pending = max(1, min(max_pending_blocks, host.size // 2))
        # Not limited by host memory: keys are all that waits. With half of it as the limit, prompts whose stores were
        # confirmed in one step did not fit, and the end of the last one was passed over.
        self._max_waiting = max_pending_blocks
        self._waiting: dict[Key, None] = {}
        self._flights: dict[int, _Flight] = {}
        self.pending_blocks = 0
        if index is not None:
            manager.pools[Tier.DISK].on_gone = index.remove

    # -- candidates ---------------------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[Key]) -> None:
        """These blocks can be found in host memory from now on."""
        passed = keys if self._filter is None else self._filter.admit(keys)
        self._counts.filtered_spill_blocks += len(keys) - len(passed)
        self._offer(passed)

    def used(self, keys: Sequence[Key]) -> None:
        """A request has found these blocks, on whatever tier. Those on disk are there already."""
        on_disk = self._manager.pools[Tier.DISK]
        news = [key for key in keys if key not in on_disk]
        if news:
            self._offer(news if self._filter is None else self._filter.hit(news))
        self.touch(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """These blocks count as used by now: tell whoever starts after us."""
        if self._index is not None:
            on_disk = self._manager.pools[Tier.DISK]
            if known := [key for key in keys if key in on_disk]:
                self._index.touch(known)

    def _offer(self, keys: Sequence[Key]) -> None:
        room = self._max_waiting - len(self._waiting)
        self._waiting.update(dict.fromkeys(keys[:room]))
        self._counts.refused_spill_blocks += len(keys[room:])

    # -- plans --------------------------------------------------------------------------------------------------------

    def plan(self) -> SpillPlan | None:
        """What to write next. The caller must deliver it to every rank."""
        room = self._max_pending - self.pending_blocks
        if not self._waiting or room <= 0 or Tier.DISK in self._manager.resting:
            return None
        batch = list(self._waiting)[:room]
        for key in batch:
            del self._waiting[key]
        host = next(iter(self._manager.pools.values()))
        self._counts.refused_spill_blocks += sum(key not in host for key in batch)
        plan = self._manager.spill(batch)
        if plan is None:
            return None
        self._flights[plan.id] = _Flight(plan, self._ranks)
        self.pending_blocks += len(plan.slots)
        return plan

    def end(self, rank: int, result: SpillResult) -> None:
        """A rank has written a spill, well or badly."""
        flight = self._flights.get(result.id)
        if flight is None or rank not in flight.ranks:
            return
        flight.ranks.remove(rank)
        flight.bad.update(result.bad)
        flight.seconds = max(flight.seconds, result.seconds)
        if flight.ranks:
            return
        del self._flights[result.id]
        blocks = len(flight.plan.slots)
        self.pending_blocks -= blocks
        written = self._manager.finish_spill(result.id, flight.bad)
        if written and self._index is not None:
            self._index.put(written)
        self._counts.spilled_blocks += len(written)
        self._counts.failed_spill_blocks += len(flight.bad)
        if written and flight.seconds:
            self._counts.add_stored(Tier.DISK, blocks * self._block_bytes, flight.seconds)

    def fail_rank(self, rank: int) -> None:
        self._waiting.clear()
        for plan_id, flight in list(self._flights.items()):
            self.end(rank, SpillResult(plan_id, list(range(len(flight.plan.slots)))))

    def reset(self) -> None:
        """Everything is forgotten, because the weights may have changed.

        What is under way ends unpublished, as its source is gone from host memory. The index is done with: the next
        engine starts from the weights on disk, and what is written from now on may be the KV of others. So it also
        bears another seal: should this process die before the index is empty, no entry of it fits a block from after
        the reset.
        """
        self._manager.seal = os.urandom(8)
        self._waiting.clear()
        if self._filter is not None:
            self._filter.forget()
        if self._index is not None:
            self._index.clear()
            self._manager.pools[Tier.DISK].on_gone = None
            self._index = None

    @property
    def under_way(self) -> bool:
        return bool(self._flights or self._waiting)

    @property
    def queued_blocks(self) -> int:
        return len(self._waiting)

    @property
    def is_persistent(self) -> bool:
        """What is written is found by the next engine; not after a reset."""
        return self._index is not None

    @property
    def is_filtered(self) -> bool:
        return self._filter is not None
