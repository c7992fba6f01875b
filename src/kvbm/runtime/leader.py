"""The leader: decides for all ranks, believes only what all ranks have confirmed.

Lives in the engine's scheduler process and is called from its one thread. It owns the block manager, hands out plans
and collects reports; it never touches a byte and never waits. Three rules keep wrong KV out:

- a store is published when every rank has confirmed it, and never if one rank has failed;
- a block whose load failed on any rank is dropped, so nobody finds it again;
- a failed load taints every store still under way: a forward pass may have computed on what did not arrive, and its
  results must not be kept under a good key. Ranks answer in any order, so a store that was planned beside a load of
  the same step is not published before that load is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvbm.core.cost import CostModel
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager, Match
from kvbm.plans import LoadPlan, LoadResult, Report, SpillPlan, StorePlan, Tier
from kvbm.runtime.counts import Counts
from kvbm.runtime.kept import KeptHost
from kvbm.runtime.spills import Spills

__all__ = ["Counts", "Leader"]


class Watcher(Protocol):
    """Is told when a plan is over on every rank; ``seconds`` of the slowest one, 0 where they are not known."""

    def loaded(self, plan: LoadPlan, seconds: float, bad: set[int]) -> None:
        """``bad``: positions of blocks that did not arrive."""

    def stored(self, plan: StorePlan, seconds: float, ok: bool) -> None: ...


class _Load:
    """A load on its way: which ranks have not answered yet, and what went wrong so far."""

    __slots__ = ("absent", "bad", "keep", "late", "missed", "plan", "ranks", "seconds", "tier_seconds")

    def __init__(self, plan: LoadPlan, ranks: int) -> None:
        self.plan = plan
        self.ranks = set(range(ranks))
        self.bad: set[int] = set()
        self.missed: dict[int, list[int]] = {}  # by rank, as it said last
        self.absent: set[int] = set()  # what the engine was told not to count on
        self.late: set[int] = set()  # ranks that still write to the host slots
        self.keep = True  # what comes from a slower tier may stay in host memory
        self.seconds = 0.0  # of the slowest rank
        self.tier_seconds: dict[Tier, float] = {}

    def take_in(self, rank: int, result: LoadResult) -> None:
        self.bad.update(result.bad)
        self.missed[rank] = result.missed
        (self.late.add if result.late else self.late.discard)(rank)


class _Store:
    """A store on its way. ``beside``: loads whose blocks the same forward pass may have computed on."""

    __slots__ = ("bad", "beside", "plan", "ranks", "seconds")

    def __init__(self, plan: StorePlan, ranks: int, beside: Iterable[int] = ()) -> None:
        self.plan = plan
        self.ranks = set(range(ranks))
        self.bad: set[int] = set()
        self.seconds = 0.0
        self.beside = set(beside)


class Leader:
    """``block_bytes``: bytes of a block on each rank, and ``cost``: whom to tell what loads took, both if known.

    ``watcher`` hears of every plan that has ended.
    ``kept_bytes``: bytes of a block that all ranks together write; fewer than they have where some keep one copy.
    """

    def __init__(
        self,
        manager: BlockManager,
        ranks: int,
        max_pending_blocks: int = 4096,
        block_bytes: Sequence[int] = (),
        cost: CostModel | None = None,
        watcher: Watcher | None = None,
        kept_bytes: int = 0,
    ) -> None:
        self.manager = manager
        self._watcher = watcher
        self._block_bytes = block_bytes
        self._kept_bytes = kept_bytes or sum(block_bytes)
        self._cost = cost
        self.counts = Counts()
        self.ranks = ranks
        self._lost: set[int] = set()
        self._max_pending = max_pending_blocks
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        # Loads that are over for the engine, while some rank's disk still owes it a read.
        self._late: dict[int, _Load] = {}
        self.spills: Spills | None = None  # where there is a disk
        self.kept: KeptHost | None = None  # where host memory outlives the engine
        # Loads under way whose blocks the current forward pass computes on.
        self._in_step: set[int] = set()
        self._tainted: set[int] = set()
        self._pending_blocks = 0
        # Engine block -> the store that is reading it. Blocks may be freed and reused while the copy runs; whoever
        # writes them next is told to wait for exactly that copy.
        self._reading: dict[int, int] = {}
        # Called with every load that has ended and the positions in it that did not arrive, for engines whose workers
        # cannot tell them.
        self.on_ended_load: Callable[[LoadPlan, set[int]], None] | None = None

    # -- plans --------------------------------------------------------------------------------------------------------

    def onboard(
        self,
        match: Match,
        request: str,
        blocks: Sequence[int],
        in_step: bool,
        layered: bool = False,
        tokens: int = 0,
        within: float = 0.0,
    ) -> LoadPlan:
        """Plan a load. The caller must deliver the plan to every rank, whatever happens to the request."""
        plan = self.manager.load(match, request, blocks, in_step, self.fences(blocks), layered, tokens, within)
        self._loads[plan.id] = _Load(plan, self.ranks)
        if in_step:
            self._in_step.add(plan.id)
        return plan

    def offload(self, keys: Sequence[Key], blocks: Sequence[int]) -> StorePlan | None:
        """Plan a store of blocks that this step completes; None when there is nothing to do or too much under way.

        The caller plans the loads of a step before its stores.
        """
        if self._lost or self._pending_blocks >= self._max_pending:
            # A bounded queue: under pressure a block is not kept, the engine is not slowed down.
            self.counts.refused_store_blocks += len(keys)
            return None
        plan = self.manager.store(keys, blocks)
        if plan is None:
            return None
        self._stores[plan.id] = _Store(plan, self.ranks, self._in_step)
        self._pending_blocks += len(plan.copy.blocks)
        for block in plan.copy.blocks:
            self._reading[block] = plan.id
        return plan

    def spill(self) -> SpillPlan | None:
        """Plan to write blocks on to disk, as far as that keeps up; None when there is nothing to do."""
        return None if self.spills is None or self._lost else self.spills.plan()

    def take_verdicts(self) -> dict[int, bool]:
        """For :attr:`kvbm.plans.StepPlan.keeps` of the next plan."""
        return {} if self.kept is None else self.kept.take_verdicts()

    def fences(self, blocks: Iterable[int]) -> list[int]:
        """Stores that must have read their source before anybody writes to ``blocks``."""
        if not self._reading:
            return []
        reading = self._reading
        return sorted({reading[block] for block in blocks if block in reading})

    # -- reports ------------------------------------------------------------------------------------------------------

    def apply(self, reports: Iterable[Report]) -> None:
        """Take in what the ranks have finished. Loads first: they decide what becomes of the stores beside them."""
        reports = list(reports)
        for report in reports:
            for load in report.loads:
                self._end_load(report.rank, load)
        for report in reports:
            for store in report.stores:
                self._end_store(report.rank, store.id, store.ok, store.seconds)
            for spill in report.spills:
                if self.spills is not None:
                    self.spills.end(report.rank, spill)

    def _end_load(self, rank: int, result: LoadResult) -> None:
        if (late := self._late.get(result.id)) is not None:
            late.take_in(rank, result)
            self._finish_late(late)
            self._rest()
            return
        flight = self._loads.get(result.id)
        if result.bad or result.missed or (flight is not None and flight.absent):
            # Whoever planned it, and again with every further rank: the engine may have gone on until it heard of it.
            self._tainted.update(self._stores)
        if flight is None:
            return
        flight.ranks.discard(rank)
        flight.take_in(rank, result)
        flight.absent.update(result.bad, result.missed)
        flight.seconds = max(flight.seconds, result.seconds)
        for tier, seconds in result.tier_seconds.items():
            flight.tier_seconds[tier] = max(flight.tier_seconds.get(tier, 0.0), seconds)
        self._rest()
        if flight.ranks:
            return
        del self._loads[result.id]
        self._in_step.discard(result.id)
        self._count_load(flight)
        self._late[result.id] = flight
        self._finish_late(flight)
        if self._watcher is not None:
            self._watcher.loaded(flight.plan, flight.seconds, flight.absent)
        if self.on_ended_load is not None:
            self.on_ended_load(flight.plan, flight.absent)
        for store_id, store in list(self._stores.items()):
            if result.id in store.beside:
                self._settle_store(store_id, store)

    def _finish_late(self, flight: _Load) -> None:
        """Let go of a load's slots once nobody writes to them any more."""
        if flight.late:
            return
        del self._late[flight.plan.id]
        missed = {position for positions in flight.missed.values() for position in positions}
        self.counts.promoted_blocks += self.manager.finish_load(flight.plan.id, flight.bad, missed, flight.keep)

    def _rest(self) -> None:
        """A disk that owes us a read is not asked for anything before it has answered."""
        owes = any(load.late for load in (*self._loads.values(), *self._late.values()))
        (self.manager.resting.add if owes else self.manager.resting.discard)(Tier.DISK)

    def _count_load(self, flight: _Load) -> None:
        """What became of a load, and how long each tier took if nothing went wrong."""
        self.counts.failed_load_blocks += len(flight.absent)
        self.counts.missed_load_blocks += len(flight.absent - flight.bad)
        blocks: dict[Tier, int] = {}
        at = 0
        for copy in flight.plan.copies:
            good = len(copy.slots) - sum(at <= position < at + len(copy.slots) for position in flight.absent)
            self.counts.add_onboarded(copy.tier, good)
            blocks[copy.tier] = blocks.get(copy.tier, 0) + len(copy.slots)
            at += len(copy.slots)
        if flight.bad or not self._block_bytes:
            return
        took = flight.tier_seconds or (dict.fromkeys(blocks, flight.seconds) if len(blocks) == 1 else {})
        for tier, seconds in took.items():
            if seconds > 0 and tier in blocks:
                # What was given up would have taken longer still: that much is known of the tier.
                if self._cost is not None:
                    self._cost.observe_load(tier, blocks[tier] * max(self._block_bytes), seconds)
                if not flight.absent:
                    self.counts.add_loaded(tier, blocks[tier] * sum(self._block_bytes), seconds)

    def _end_store(self, rank: int, plan_id: int, ok: bool, seconds: float = 0.0) -> None:
        flight = self._stores.get(plan_id)
        if flight is None:
            return
        if not ok:
            flight.bad.add(rank)
        if rank not in flight.ranks:
            return
        flight.seconds = max(flight.seconds, seconds)
        flight.ranks.remove(rank)
        if flight.ranks:
            return
        # Every rank has read its source: the engine's blocks are its own again, whatever becomes of the copy.
        blocks = flight.plan.copy.blocks
        self._pending_blocks -= len(blocks)
        for block in blocks:
            if self._reading.get(block) == plan_id:
                del self._reading[block]
        self._settle_store(plan_id, flight)

    def _settle_store(self, plan_id: int, flight: _Store) -> None:
        """Publish or forget a store once it is over on every rank and so is every load beside it."""
        if flight.ranks or not flight.beside.isdisjoint(self._in_step):
            return
        del self._stores[plan_id]
        blocks = len(flight.plan.copy.blocks)
        tainted = plan_id in self._tainted
        self._tainted.discard(plan_id)
        if flight.bad:
            self.counts.failed_store_blocks += blocks
        elif tainted:
            self.counts.tainted_store_blocks += blocks
        elif flight.seconds and self._block_bytes:
            self.counts.add_stored(flight.plan.copy.tier, blocks * self._kept_bytes, flight.seconds)
        ok = not flight.bad and not tainted
        keys = self.manager.finish_store(plan_id, ok)
        self.counts.offloaded_blocks += len(keys)
        if self.kept is not None:
            self.kept.settled(flight.plan, keys)
        if keys and self.spills is not None:
            self.spills.stored(keys)
        if self._watcher is not None:
            self._watcher.stored(flight.plan, flight.seconds, ok)

    def fail_rank(self, rank: int) -> None:
        """A rank is gone for good: what it still owed has failed, and the cache rests from here on.

        The other ranks finish what they have begun. Nothing is found and nothing is kept any more: a rank out of reach
        can neither load nor store its share, and should it be alive after all, no slot that it may still be writing is
        given to another block. May be called again for the same rank.
        """
        if rank in self._lost:
            return
        self._lost.add(rank)
        for plan_id, flight in list(self._loads.items()):
            if rank in flight.ranks:
                self._end_load(rank, LoadResult(plan_id, list(range(len(flight.plan.blocks)))))
        for load in (*self._loads.values(), *self._late.values()):
            load.late.discard(rank)
            load.keep = False
        for load in list(self._late.values()):
            self._finish_late(load)
        self._rest()
        for plan_id in list(self._stores):
            self._end_store(rank, plan_id, ok=False)
        if self.spills is not None:
            self.spills.fail_rank(rank)
        self.manager.clear()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block. What is under way ends unpublished: it may be the KV of weights that are gone."""
        self.manager.clear()  # first: no block is found, whatever fails after it
        self._tainted.update(self._stores)
        for load in (*self._loads.values(), *self._late.values()):
            load.keep = False
        if self.spills is not None:
            self.spills.reset()
        if self.kept is not None:
            self.kept.reset()

    def forget(self, tier: Tier, keys: Iterable[Key] | None = None) -> int:
        """Drop these blocks of one tier, or all of them, and return how many there were.

        Unlike a reset it says nothing of the weights: other tiers keep theirs, and what is under way comes in as usual.
        """
        pool = self.manager.pools[tier]
        return pool.drop_many(list(pool.findable) if keys is None else keys)

    def used(self, keys: Sequence[Key]) -> None:
        """A request has found these blocks, on whatever tier or on the device, and did not have to compute them."""
        if self.spills is not None:
            self.spills.used(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """A request has used these blocks, wherever it has them from: its last ones are the first to go."""
        self.manager.touch(keys)
        if self.spills is not None:
            self.spills.touch(keys)
        if self.kept is not None:
            self.kept.touch(keys)

    def stores_in_flight(self) -> list[int]:
        """Ids of all stores that some rank has not confirmed."""
        return [plan_id for plan_id, flight in self._stores.items() if flight.ranks]

    def under_way(self) -> list[LoadPlan | StorePlan]:
        """All plans that are not over. May be asked from any thread: copying a dict's values takes the interpreter one
        go."""
        loads, stores = list(self._loads.values()), list(self._stores.values())
        return [*(load.plan for load in loads), *(store.plan for store in stores)]

    @property
    def plans_under_way(self) -> int:
        return len(self._loads) + len(self._stores)

    @property
    def loads_under_way(self) -> bool:
        return bool(self._loads)

    @property
    def stores_under_way(self) -> bool:
        return bool(self._stores)

    @property
    def unconfirmed_store_blocks(self) -> int:
        return sum(len(store.plan.copy.blocks) for store in self._stores.values())

    @property
    def keeping(self) -> bool:
        """Blocks are on their way to a tier, or workers have not heard yet which of them to keep."""
        owes = self.kept is not None and self.kept.owes
        return owes or bool(self._stores) or (self.spills is not None and self.spills.under_way)

    @property
    def busy(self) -> bool:
        return bool(self._stores or self._loads or self._late or (self.spills is not None and self.spills.under_way))
