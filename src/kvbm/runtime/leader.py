"""The leader: decides for all ranks, and publishes only blocks that all ranks have confirmed.

The leader lives in the engine's scheduler process, and one thread calls it. It owns the block manager, hands out plans
and collects reports; it never touches a byte and never waits. Three rules keep wrong KV out:

- a store is published when every rank has confirmed it, and never if one rank has failed;
- a block whose load failed on any rank is dropped, so no lookup finds it again;
- a failed load taints every store still under way: a forward pass may have computed on blocks that did not arrive, and
  its results must not be kept under a good key. Ranks answer in any order, so a store that was planned beside a load of
  the same step is not published before that load is over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, KeysView, Sequence
from typing import Protocol

import msgspec

from kvbm.core.breaker import Breaker
from kvbm.core.cost import CostModel
from kvbm.core.counts import Counts, add
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager
from kvbm.core.match import Match
from kvbm.core.policy import COMMON, NO_HINTS, Turn
from kvbm.plans import LoadPlan, LoadResult, MovePlan, MoveResult, Report, StorePlan, StoreResult, TierName
from kvbm.runtime.unpackable import Unpackable
from kvbm.tiers.base import Route
from kvbm.tiers.edges import Edge
from kvbm.tiers.fetches import Fetches

__all__ = ["Counts", "Leader"]


class Watcher(Protocol):
    """Is told when a plan is over on every rank; ``seconds`` of the slowest one, 0 where they are not known."""

    def loaded(self, plan: LoadPlan, seconds: float, bad: set[int]) -> None:
        """``bad``: positions of blocks that did not arrive."""

    def stored(self, plan: StorePlan, seconds: float, ok: bool) -> None: ...

    def moves_planned(self) -> None:
        """Edges have planned moves, or passed over blocks that waited."""

    def moved(self, plan_id: int, target: TierName, blocks: int, bad: int) -> None:
        """``bad``: blocks that were not written."""


class _Load(msgspec.Struct, eq=False):
    """A load on its way: which ranks have not answered yet, and which blocks did not arrive so far."""

    plan: LoadPlan
    ranks: set[int]
    bad: set[int] = set()
    missed: dict[int, list[int]] = {}  # by rank, as it said last
    absent: set[int] = set()  # positions that the engine was told not to count on
    late: dict[int, list[TierName]] = {}  # by rank: tiers that still write to the near slots
    keep: bool = True  # blocks of staged tiers may stay in the near one
    seconds: float = 0.0  # of the slowest rank
    tier_seconds: dict[TierName, float] = {}

    def take_in(self, rank: int, result: LoadResult) -> None:
        self.bad.update(result.bad)
        self.missed[rank] = result.missed
        if result.late:
            self.late[rank] = result.late
        else:
            self.late.pop(rank, None)


class _Store(msgspec.Struct, eq=False):
    """A store on its way."""

    plan: StorePlan
    ranks: set[int]  # that have not answered yet
    beside: set[int]  # loads whose blocks the same forward pass may have computed on
    bad: set[int] = set()  # ranks
    seconds: float = 0.0
    unpackable: set[int] = set()


class Leader:
    """``block_bytes``: bytes of a block on each rank, if known. ``cost`` learns how long loads took.

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
        self.clock = manager.clock
        self._watcher = watcher
        self._block_bytes = block_bytes
        self._kept_bytes = kept_bytes or sum(block_bytes)
        self._cost = cost
        self.counts = Counts()
        self.unpackable = Unpackable(self.counts)
        self.ranks = ranks
        self._lost: set[int] = set()
        self._max_pending = max_pending_blocks
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, _Store] = {}
        # Loads that are over for the engine, while a tier still owes some rank a read.
        self._late: dict[int, _Load] = {}
        self.edges: list[Edge] = []
        self.breakers = {tier: Breaker() for tier in manager.catalogs if tier != manager.near_tier}
        self.fetches = Fetches(manager, ranks, self.counts, self.breakers, self._observe_fetch)
        # Stores that are over, and whether they were good: for the workers of a near tier that outlives the engine.
        self._verdicts: dict[int, bool] = {}
        # Loads under way whose blocks the current forward pass computes on.
        self._in_step: set[int] = set()
        self._tainted: set[int] = set()
        self._pending_blocks = 0
        # Engine block -> the store that is reading it. Blocks may be freed and reused while the copy runs; the step or
        # load that writes them next waits for exactly that copy.
        self._reading: dict[int, int] = {}
        # Called with every load that has ended and the positions in it that did not arrive.
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
        deadline_seconds: float = 0.0,
        tenant: int = COMMON,
        stall_seconds: float = 0.0,
    ) -> LoadPlan:
        """Plan a load. The caller must deliver the plan to every rank, even if the request ends."""
        fences = self.fences(blocks)
        plan = self.manager.load(
            match, request, blocks, in_step, fences, layered, tokens, deadline_seconds, tenant, stall_seconds
        )
        self._loads[plan.id] = _Load(plan, set(range(self.ranks)))
        if in_step:
            self._in_step.add(plan.id)
        return plan

    def offload(
        self, keys: Sequence[Key], blocks: Sequence[int], tenants: Sequence[int] | None = None
    ) -> StorePlan | None:
        """Plan a store of blocks that this step completes; None when there is nothing to do or too much under way.

        The caller plans the loads of a step before its stores.
        """
        if self._lost or self._pending_blocks >= self._max_pending:
            # A bounded queue: under pressure a block is not kept, the engine is not slowed down.
            self.counts.refused_store_blocks += len(keys)
            return None
        plan = self.manager.store(keys, blocks, tenants)
        if plan is None:
            return None
        self._stores[plan.id] = _Store(plan, set(range(self.ranks)), set(self._in_step))
        self._pending_blocks += len(plan.copy.blocks)
        for block in plan.copy.blocks:
            self._reading[block] = plan.id
        return plan

    def add_edge(self, route: Route) -> None:
        """Let blocks move on this way."""
        self.edges.append(Edge(route, self.manager, self.ranks, self.counts, self._kept_bytes))
        for edge in self.edges:
            edge.share_near_tier(len(self.edges))

    def plan_moves(self) -> list[MovePlan]:
        """Plan to write blocks on to other tiers, as far as those keep up."""
        if self._lost:
            return []
        self.clock.tick()
        self._suspend()  # with every step: a breaker closes when its pause is over
        waiting = [edge.queued_blocks for edge in self.edges]
        plans = [plan for edge in self.edges if (plan := edge.plan()) is not None]
        if self._watcher is not None and waiting != [edge.queued_blocks for edge in self.edges]:
            self._watcher.moves_planned()
        return self.fetches.take_due() + plans

    def take_verdicts(self) -> dict[int, bool]:
        """For :attr:`kvbm.plans.StepPlan.verdicts` of the next plan, which must reach every rank."""
        verdicts, self._verdicts = self._verdicts, {}
        return verdicts

    @property
    def owes_verdicts(self) -> bool:
        return bool(self._verdicts)

    def fences(self, blocks: Iterable[int], too_late: bool = False) -> list[int]:
        """Stores that must have read their source before a step or a load writes to ``blocks``. ``too_late``: the
        engine writes there before it waits, so none of them is published."""
        if not self._reading:
            return []
        reading = self._reading
        found = {reading[block] for block in blocks if block in reading}
        if too_late:
            self._tainted.update(found)
        return sorted(found)

    # -- reports ------------------------------------------------------------------------------------------------------

    def apply(self, reports: Iterable[Report]) -> None:
        """Take in what the ranks have finished. Loads first: they decide what becomes of the stores beside them."""
        self.clock.tick()
        reports = list(reports)
        for report in reports:
            for load in report.loads:
                self._end_load(report.rank, load)
        for report in reports:
            for store in report.stores:
                self._end_store(report.rank, store)
            for move in report.moves:
                self.fetches.end(report.rank, move, time.monotonic())
                for edge in self.edges:
                    self._end_move(edge, report.rank, move)

    def _end_move(self, edge: Edge, rank: int, result: MoveResult) -> None:
        pending = edge.pending_blocks
        written = edge.end(rank, result)
        ended = pending - edge.pending_blocks  # 0 while another rank owes its answer
        if ended and self._watcher is not None:
            self._watcher.moved(result.id, edge.target, ended, ended - len(written))
        if written:
            self._arrived(edge.target, written)

    def _end_load(self, rank: int, result: LoadResult) -> None:
        if (late := self._late.get(result.id)) is not None:
            late.take_in(rank, result)
            self._finish_late(late)
            self._suspend()
            return
        flight = self._loads.get(result.id)
        if result.bad or result.missed or (flight is not None and flight.absent):
            # Again with every further rank: the engine may have gone on until it heard of the failure.
            self._tainted.update(self._stores)
        if flight is None:
            return
        flight.ranks.discard(rank)
        flight.take_in(rank, result)
        for tier in result.late:
            self.manager.catalogs[tier].suspect()
        flight.absent.update(result.bad, result.missed)
        flight.seconds = max(flight.seconds, result.seconds)
        for tier, seconds in result.tier_seconds.items():
            flight.tier_seconds[tier] = max(flight.tier_seconds.get(tier, 0.0), seconds)
        if flight.ranks:
            self._suspend()
            return
        del self._loads[result.id]
        self._in_step.discard(result.id)
        self._count_load(flight)
        self._late[result.id] = flight
        self._finish_late(flight)
        self._suspend()
        if self._watcher is not None:
            self._watcher.loaded(flight.plan, flight.seconds, flight.absent)
        if self.on_ended_load is not None:
            self.on_ended_load(flight.plan, flight.absent)
        for store_id, store in list(self._stores.items()):
            if result.id in store.beside:
                self._settle_store(store_id, store)

    def _finish_late(self, flight: _Load) -> None:
        """Let go of a load's slots once no read writes to them any more."""
        if flight.late:
            return
        del self._late[flight.plan.id]
        missed = {position for positions in flight.missed.values() for position in positions}
        self.counts.promoted_blocks += self.manager.finish_load(flight.plan.id, flight.bad, missed, flight.keep)

    def _suspend(self) -> None:
        """Suspend every tier whose breaker is open: it owes a read, or its operations keep failing."""
        late = [tiers for load in (*self._loads.values(), *self._late.values()) for tiers in load.late.values()]
        now = time.monotonic()
        for tier, breaker in self.breakers.items():
            breaker.late = sum(tier in tiers for tiers in late)
            (self.manager.suspended.add if breaker.is_open(now) else self.manager.suspended.discard)(tier)

    def _count_load(self, flight: _Load) -> None:
        """Count a load's blocks, and how long each tier took if nothing went wrong."""
        self.counts.failed_load_blocks += len(flight.absent)
        self.counts.missed_load_blocks += len(flight.absent - flight.bad)
        blocks, absent, bad = map(flight.plan.by_tier, (None, flight.absent, flight.bad))
        for tier, count in blocks.items():
            good = count - absent[tier]
            add(self.counts.onboarded_blocks, tier, good)
            if (breaker := self.breakers.get(tier)) is not None:
                if bad[tier] == count:
                    breaker.failed(time.monotonic())
                elif good:
                    breaker.succeeded()
        if flight.bad or not self._block_bytes:
            return
        took = flight.tier_seconds or (dict.fromkeys(blocks, flight.seconds) if len(blocks) == 1 else {})
        for tier, seconds in took.items():
            if seconds > 0 and tier in blocks:
                # A load that was given up would have taken longer still: the cost model learns at least that much.
                places = (place for copy in flight.plan.copies if copy.tier == tier for place in copy.slots)
                self._teach_cost(tier, blocks[tier], places, seconds)
                if not flight.absent:
                    self.counts.add_loaded(tier, blocks[tier] * sum(self._block_bytes), seconds)

    def _observe_fetch(self, tier: TierName, places: Sequence[int], seconds: float) -> None:
        if self._block_bytes:
            self.counts.add_loaded(tier, len(places) * sum(self._block_bytes), seconds)
            self._teach_cost(tier, len(places), places, seconds)

    def _teach_cost(self, tier: TierName, blocks: int, places: Iterable[int], seconds: float) -> None:
        if self._cost is not None:
            catalog = self.manager.catalogs[tier]
            alone = sum(map(catalog.is_alone, places)) if catalog.is_remote else 0
            self._cost.observe_load(tier, (blocks - alone) * max(self._block_bytes), seconds, alone)

    def _end_store(self, rank: int, result: StoreResult) -> None:
        flight = self._stores.get(result.id)
        if flight is None:
            return
        if not result.ok:
            flight.bad.add(rank)
        flight.unpackable.update(result.unpackable)
        if result.escapes is not None:
            self.counts.sampled_blocks += 1
            self.counts.sampled_escapes += result.escapes
        if rank not in flight.ranks:
            return
        flight.seconds = max(flight.seconds, result.seconds)
        flight.ranks.remove(rank)
        if flight.ranks:
            return
        # Every rank has read its source: the engine's blocks need no fence any more, even if the copy fails.
        blocks = flight.plan.copy.blocks
        self._pending_blocks -= len(blocks)
        for block in blocks:
            if self._reading.get(block) == result.id:
                del self._reading[block]
        self._settle_store(result.id, flight)

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
        keys = self.manager.finish_store(plan_id, ok, flight.unpackable)
        self.counts.offloaded_blocks += len(keys)
        if ok and flight.unpackable:
            self.unpackable.add(len(flight.unpackable))
        if self.manager.tags_stores:
            self._verdicts[plan_id] = bool(keys)
        if keys:
            self._arrived(self.manager.near_tier, keys)
        if self._watcher is not None:
            self._watcher.stored(flight.plan, flight.seconds, ok)

    def _arrived(self, tier: TierName, keys: Sequence[Key]) -> None:
        """These blocks can be found in this tier from now on, and may move on from there."""
        for edge in self.edges:
            if edge.source == tier:
                edge.stored(keys)

    def fail_rank(self, rank: int) -> None:
        """A rank is gone for good: its plans under way have failed, and the cache is off from here on.

        The other ranks finish what they have begun. No lookup finds a block, and no block is stored any more: a lost
        rank can neither load nor store its share. It may still be running, so its slots are not given to other
        blocks. May be called again for the same rank.
        """
        if rank in self._lost:
            return
        self._lost.add(rank)
        self.clock.tick()
        for plan_id, flight in list(self._loads.items()):
            if rank in flight.ranks:
                self._end_load(rank, LoadResult(plan_id, list(range(len(flight.plan.blocks)))))
        for load in (*self._loads.values(), *self._late.values()):
            load.late.pop(rank, None)
            load.keep = False
        for load in list(self._late.values()):
            self._finish_late(load)
        self._suspend()
        for plan_id in list(self._stores):
            self._end_store(rank, StoreResult(plan_id, ok=False))
        for edge in self.edges:
            edge.fail_rank(rank)
        self.fetches.fail_rank(rank, time.monotonic())
        self.manager.clear()

    # -- the rest -----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget every block, because the weights may have changed. Plans under way end unpublished.

        The next engine starts from the weights on disk, and blocks written from now on may be the KV of others. So the
        journals of persistent tiers are emptied and closed, and a new generation goes into every tag: if this
        process dies before a journal is empty, no entry of it matches a block from after the reset.
        """
        self.manager.clear()  # first: no block is found even if a later call fails
        self._tainted.update(self._stores)
        for load in (*self._loads.values(), *self._late.values()):
            load.keep = False
        for edge in self.edges:
            edge.reset()
        self.manager.generation = os.urandom(8)
        for catalog in self.manager.catalogs.values():
            catalog.discard()

    def forget(self, tier: TierName, keys: Iterable[Key] | None = None) -> int:
        """Drop these blocks of one tier, or all of them, and return how many there were.

        Unlike a reset this says nothing about the weights: other tiers keep their blocks, and plans under way go on.
        """
        catalog = self.manager.catalogs[tier]
        return catalog.drop(list(catalog.findable) if keys is None else keys)

    def used(self, keys: Sequence[Key]) -> None:
        """A request has found these blocks, on any tier or on the device, and did not compute them."""
        for edge in self.edges:
            edge.used(keys)

    def touch(self, keys: Sequence[Key], turn: Turn = NO_HINTS, is_prefix: bool = False) -> None:
        """A request has ended that used these blocks, wherever it found them: its last ones are the first to go.
        ``is_prefix``: they are the front of its prompt, without a gap."""
        self.manager.touch(keys, turn, is_prefix)

    def stores_in_flight(self) -> list[int]:
        """Ids of all stores that some rank has not confirmed."""
        return [plan_id for plan_id, flight in self._stores.items() if flight.ranks]

    def under_way(self) -> list[LoadPlan | StorePlan]:
        """All plans that are not over. Any thread may call it: the interpreter copies a dict's values atomically."""
        loads, stores = list(self._loads.values()), list(self._stores.values())
        return [*(load.plan for load in loads), *(store.plan for store in stores)]

    @property
    def plans_under_way(self) -> int:
        return len(self._loads) + len(self._stores)

    @property
    def loads(self) -> KeysView[int]:
        """Ids of the loads under way."""
        return self._loads.keys()

    @property
    def unconfirmed_store_blocks(self) -> int:
        return sum(len(store.plan.copy.blocks) for store in self._stores.values())

    @property
    def keeping(self) -> bool:
        """Blocks are on their way to a tier, or workers have not heard yet which of them to keep."""
        return self.owes_verdicts or bool(self._stores) or self.moves_under_way

    @property
    def moves_under_way(self) -> bool:
        return self.fetches.under_way or any(edge.under_way for edge in self.edges)

    @property
    def busy(self) -> bool:
        return bool(self._stores or self._loads or self._late or self.moves_under_way)
