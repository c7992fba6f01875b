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

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from kvbm.core.cost import CostModel
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager, Match
from kvbm.plans import LoadPlan, Report, StorePlan, Tier

T = TypeVar("T", int, float)


class Counts(msgspec.Struct):
    """What has happened since the start.

    Blocks count once, not once a rank. Bytes are those of all ranks, seconds those of the slowest one, and both are of
    transfers that went well and whose time is known.
    """

    matched_blocks: dict[Tier, int] = msgspec.field(default_factory=dict)
    matched_tokens: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: dict[Tier, int] = msgspec.field(default_factory=dict)
    failed_load_blocks: int = 0
    failed_store_blocks: int = 0
    tainted_store_blocks: int = 0
    refused_store_blocks: int = 0
    refused_load_blocks: dict[str, int] = msgspec.field(default_factory=dict)  # found and not loaded, by reason
    loaded_bytes: dict[Tier, int] = msgspec.field(default_factory=dict)
    loaded_seconds: dict[Tier, float] = msgspec.field(default_factory=dict)
    stored_bytes: dict[Tier, int] = msgspec.field(default_factory=dict)
    stored_seconds: dict[Tier, float] = msgspec.field(default_factory=dict)


class Watcher(Protocol):
    """Is told when a plan is over on every rank; ``seconds`` of the slowest one, 0 where they are not known."""

    def loaded(self, plan: LoadPlan, seconds: float, bad: set[int]) -> None:
        """``bad``: positions of blocks that did not arrive."""

    def stored(self, plan: StorePlan, seconds: float, ok: bool) -> None: ...


class _Flight:
    """A plan on its way: which ranks have not answered yet, and what went wrong so far."""

    __slots__ = ("bad", "beside", "plan", "ranks", "seconds")

    def __init__(self, plan: LoadPlan | StorePlan, ranks: int, beside: Iterable[int] = ()) -> None:
        self.plan = plan
        self.ranks = set(range(ranks))
        self.bad: set[int] = set()
        self.seconds = 0.0  # of the slowest rank
        # A store's loads: those whose blocks the same forward pass may have computed on.
        self.beside = set(beside)


class Leader:
    """``block_bytes``: bytes of a block on each rank, and ``cost``: whom to tell what loads took, both if known.

    ``watcher`` hears of every plan that has ended.
    """

    def __init__(
        self,
        manager: BlockManager,
        ranks: int,
        max_pending_blocks: int = 4096,
        block_bytes: Sequence[int] = (),
        cost: CostModel | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.manager = manager
        self._watcher = watcher
        self._block_bytes = block_bytes
        self._cost = cost
        self.counts = Counts()
        self.faults: Counter[str] = Counter()
        self._ranks = ranks
        self._lost: set[int] = set()
        self._max_pending = max_pending_blocks
        self._loads: dict[int, _Flight] = {}
        self._stores: dict[int, _Flight] = {}
        # Loads under way whose blocks the current forward pass computes on.
        self._in_step: set[int] = set()
        self._tainted: set[int] = set()
        self._pending_blocks = 0
        # Engine block -> the store that is reading it. Blocks may be freed and reused while the copy runs; whoever
        # writes them next is told to wait for exactly that copy.
        self._reading: dict[int, int] = {}
        # Called with a load that has ended badly and the positions in it that did not arrive, for engines that must be
        # told so by the leader.
        self.on_failed_load: Callable[[LoadPlan, set[int]], None] | None = None

    # -- plans --------------------------------------------------------------------------------------------------------

    def onboard(
        self, match: Match, request: str, blocks: Sequence[int], in_step: bool, layered: bool = False, tokens: int = 0
    ) -> LoadPlan:
        """Plan a load. The caller must deliver the plan to every rank, whatever happens to the request."""
        plan = self.manager.load(match, request, blocks, in_step, self.fences(blocks), layered, tokens)
        self._loads[plan.id] = _Flight(plan, self._ranks)
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
        self._stores[plan.id] = _Flight(plan, self._ranks, self._in_step)
        self._pending_blocks += len(plan.copy.blocks)
        for block in plan.copy.blocks:
            self._reading[block] = plan.id
        return plan

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
            for reason, times in report.faults.items():
                self.faults[reason] += times
            for load in report.loads:
                self._end_load(report.rank, load.id, load.bad, load.seconds)
        for report in reports:
            for store in report.stores:
                self._end_store(report.rank, store.id, store.ok, store.seconds)

    def _end_load(self, rank: int, plan_id: int, bad: list[int], seconds: float = 0.0) -> None:
        flight = self._loads.get(plan_id)
        if bad or (flight is not None and flight.bad):
            # Whoever planned it, and again with every further rank: the engine may have gone on until it heard of it.
            self._tainted.update(self._stores)
        if flight is None:
            return
        flight.ranks.discard(rank)
        flight.bad.update(bad)
        flight.seconds = max(flight.seconds, seconds)
        if flight.ranks:
            return
        del self._loads[plan_id]
        self._in_step.discard(plan_id)
        assert isinstance(flight.plan, LoadPlan)
        self.counts.failed_load_blocks += len(flight.bad)
        at = 0
        for copy in flight.plan.copies:
            good = sum(position not in flight.bad for position in range(at, at + len(copy.slots)))
            _add(self.counts.onboarded_blocks, copy.tier, good)
            at += len(copy.slots)
        self._note_load(flight)
        self.manager.finish_load(plan_id, flight.bad)
        if self._watcher is not None:
            self._watcher.loaded(flight.plan, flight.seconds, flight.bad)
        if flight.bad and self.on_failed_load is not None:
            self.on_failed_load(flight.plan, flight.bad)
        for store_id, store in list(self._stores.items()):
            if plan_id in store.beside:
                self._settle_store(store_id, store)

    def _note_load(self, flight: _Flight) -> None:
        """What a good load took, when it says something about one tier."""
        assert isinstance(flight.plan, LoadPlan)
        tiers = {copy.tier for copy in flight.plan.copies}
        if flight.bad or not flight.seconds or not self._block_bytes or len(tiers) != 1:
            return
        (tier,) = tiers
        blocks = len(flight.plan.blocks)
        if self._cost is not None:
            self._cost.observe_load(tier, blocks * max(self._block_bytes), flight.seconds)
        _add(self.counts.loaded_bytes, tier, blocks * sum(self._block_bytes))
        _add(self.counts.loaded_seconds, tier, flight.seconds)

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
        assert isinstance(flight.plan, StorePlan)
        blocks = flight.plan.copy.blocks
        self._pending_blocks -= len(blocks)
        for block in blocks:
            if self._reading.get(block) == plan_id:
                del self._reading[block]
        self._settle_store(plan_id, flight)

    def _settle_store(self, plan_id: int, flight: _Flight) -> None:
        """Publish or forget a store once it is over on every rank and so is every load beside it."""
        if flight.ranks or not flight.beside.isdisjoint(self._in_step):
            return
        del self._stores[plan_id]
        assert isinstance(flight.plan, StorePlan)
        blocks = len(flight.plan.copy.blocks)
        tainted = plan_id in self._tainted
        self._tainted.discard(plan_id)
        if flight.bad:
            self.counts.failed_store_blocks += blocks
        elif tainted:
            self.counts.tainted_store_blocks += blocks
        elif flight.seconds and self._block_bytes:
            tier = flight.plan.copy.tier
            _add(self.counts.stored_bytes, tier, blocks * sum(self._block_bytes))
            _add(self.counts.stored_seconds, tier, flight.seconds)
        ok = not flight.bad and not tainted
        self.counts.offloaded_blocks += self.manager.finish_store(plan_id, ok)
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
        self.faults["rank lost"] += 1
        for plan_id, flight in list(self._loads.items()):
            if rank in flight.ranks:
                assert isinstance(flight.plan, LoadPlan)
                self._end_load(rank, plan_id, list(range(len(flight.plan.blocks))))
        for plan_id in list(self._stores):
            self._end_store(rank, plan_id, ok=False)
        self.manager.clear()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block. Stores under way end unpublished: they may hold the KV of weights that are gone."""
        self._tainted.update(self._stores)
        self.manager.clear()

    def stores_in_flight(self) -> list[int]:
        """Ids of all stores that some rank has not confirmed."""
        return [plan_id for plan_id, flight in self._stores.items() if flight.ranks]

    def under_way(self) -> list[LoadPlan | StorePlan]:
        """All plans that are not over. May be asked from any thread: copying a dict's values takes the interpreter one
        go."""
        return [flight.plan for flight in (*list(self._loads.values()), *list(self._stores.values()))]

    @property
    def plans_under_way(self) -> int:
        return len(self._loads) + len(self._stores)

    @property
    def stores_under_way(self) -> bool:
        return bool(self._stores)

    @property
    def busy(self) -> bool:
        return bool(self._stores or self._loads)


def _add(totals: dict[Tier, T], tier: Tier, value: T) -> None:
    totals[tier] = totals.get(tier, 0) + value
