"""Pages by key, in the tiers behind a storage backend.

A :class:`PageStore` is leader and worker of one rank in one object. The leader (:class:`~kvbm.runtime.leader.Leader`)
keeps the books as it does for the other engines: catalogs, the edges between tiers with their admission filters and
bounded queues, circuit breakers, the cost model and the counts. SGLang's threads are the workers: each carries out the
plans of its own call and reports to the leader. One lock guards the leader. No thread holds it across a copy or I/O.

Pages pass through a slab of KVBM's own on their way to and from a staged tier, also where that slab is no tier of its
own: a read that was given up because a store hangs must not write to a page of SGLang later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import inf

from kvbm.core.cost import RECOMPUTE, CostModel
from kvbm.core.counts import Counts, add
from kvbm.core.keys import Key
from kvbm.core.match import Match
from kvbm.core.policy import Turn
from kvbm.engines.sglang.loads import POLL_SECONDS, AwaitedStore, PageLoad, oldest
from kvbm.engines.sglang.pages import Page, gather
from kvbm.engines.sglang.tiers import open_tiers
from kvbm.observe.requests import RequestLog, looked_up
from kvbm.plans import LoadPlan, LoadResult, Report, StoreResult
from kvbm.runtime.leader import Leader
from kvbm.runtime.moves import Moves
from kvbm.runtime.tiers import connect
from kvbm.tiers import bounded, registry
from kvbm.tiers.base import RankContext
from kvbm.tiers.bounded import keep_until_exit
from kvbm.tiers.registry import NEAR

logger = logging.getLogger("kvbm")

# A load that takes longer than computing its pages is given up, but not before this: the cost model does not know the
# speed of SGLang's prefill to the millisecond.
SHORTEST_LOAD_SECONDS = 1.0

_GROUP_PAGES = 32  # a put past the near tier copies so many while the store writes those before
_ANSWER_SECONDS = 0.002  # between two looks for the answer of a remote tier
_PROBE_SECONDS = 0.1  # between two looks at a circuit breaker that keeps pages waiting


class PageStore:
    """Pages of one size. Any thread may call any method, and none raises because a tier fails.

    ``context``: the rank, with the size of a page as that of a block. ``page_tokens``: of a page; 0 where that is not
    known, and the cost model has no say. ``is_awaited``: requests wait for their pages; False where SGLang starts them
    with those that have come by then. ``log`` receives lookups and loads, ``note`` the reasons of failures. ``prefill``
    returns tokens and seconds of the batches that were computed since it was last asked.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        page_tokens: int = 0,
        is_awaited: bool = True,
        log: RequestLog | None = None,
        note: Callable[[str, int], None] | None = None,
        prefill: Callable[[], Sequence[tuple[int, float]]] | None = None,
    ) -> None:
        context, self._slab, self._stores, self._manager, hello = open_tiers(context)
        config = context.config
        self.page_bytes = context.block_bytes
        self.page_tokens = page_tokens
        self._is_reader = context.access == "reader"
        self._log, self._note, self._prefill = log, note, prefill
        self.cost = CostModel(
            registry.priors(),
            layers_from=inf,
            mode="async",  # SGLang loads between two steps
            load="always" if config.load == "auto" and not is_awaited else config.load,
            tokens_per_second=config.prefill_tokens_per_second,
        )
        self.leader = Leader(self._manager, 1, config.max_pending_offloads, [self.page_bytes], self.cost, log)
        connect(config, [hello], self.leader, self.cost)
        self._has_near_tier = NEAR.is_wanted(config)
        # Without a near tier a page counts as kept when this edge has taken it to its target.
        self._bypass = next((edge for edge in self.leader.edges if edge.bypass), None)
        slots = self._manager.near.size
        self._load_pages = self._group = max(1, slots // 4)  # two such loads leave half of the slots to puts
        if self._bypass is not None:
            # A put waits for the store, and must not overrun the queue to it.
            self._group = min(self._load_pages, _GROUP_PAGES, config.max_pending_spills)
        self._has_deadline = config.load == "auto" and is_awaited and page_tokens > 0
        self._targets = {name: AwaitedStore(name, store, self._slab) for name, store in self._stores.items()}
        self._faults: Counter[str] = Counter()
        self._moves = Moves(NEAR.name, self._targets, lambda tier, slots: None, self._faults)
        self._numbers = count(1)  # of lookups
        self._late: list[PageLoad] = []  # given up, while a store still writes to their slots
        self._users = 0  # calls that copy pages right now
        self._closing = False
        self._ends_at = inf  # when the thread stops waiting for the stores
        # Guards the leader and all the above. Notified when room or an answer may have come.
        self._changed = threading.Condition(threading.Lock())
        self._thread = threading.Thread(target=self._run, name="kvbm-store", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> Counts:
        return self.leader.counts

    @property
    def lock(self) -> threading.Condition:
        """Guards the leader: control commands take it too."""
        return self._changed

    def describe(self) -> str:
        """For the log line of the rank."""
        near = f"{self._manager.near.size} {NEAR.name if self._has_near_tier else 'staging'} slots"
        return ", ".join([near, *(store.describe() for store in self._stores.values())])

    # -- finding ------------------------------------------------------------------------------------------------------

    def count(self, keys: Sequence[Key]) -> int:
        """How many pages from the first on are there, and are expected to be loaded sooner than computed."""
        with self._changed:
            match = self._find(keys)
            # SGLang asks once, from a thread of its own, which may wait. The tier bounds how long an answer is due.
            while match.pending and self._manager.awaited_answer(keys[match.blocks]) is not None and not self._closing:
                self._changed.wait(_ANSWER_SECONDS)
                match = self._find(keys)
            pages, why = match.blocks, ""
            for tokens, seconds in self._prefill() if self._prefill is not None else ():
                self.cost.observe_prefill(tokens, seconds)
            if pages and self.page_tokens:
                asked = len(keys) * self.page_tokens
                decision = self.cost.decide(match, self.page_bytes, self.page_tokens, 0, asked, others_running=True)
                if decision.blocks < pages:
                    why = RECOMPUTE if decision.blocks else decision.reason
                    add(self.counts.refused_load_blocks, why, pages - decision.blocks)
                    self.cost.observe_refusal(match.beyond(decision.blocks))
                    pages = decision.blocks
            for tier, slots, _ in match.cut(pages).runs:
                add(self.counts.matched_blocks, tier, len(slots))
            self.counts.matched_tokens += pages * self.page_tokens
            if self._log is not None:
                name, tokens = str(next(self._numbers)), len(keys) * self.page_tokens
                seen = looked_up(name, tokens, 0, len(keys), match, pages, self.page_tokens)
                self._log.admitted(seen._replace(why=why))
                self._log.finished(name, 0, ())  # SGLang does not say when a request ends
            return pages

    def has(self, keys: Sequence[Key]) -> list[bool]:
        with self._changed:
            self._start_moves()
            suspended = self._manager.suspended
            catalogs = [catalog for tier, catalog in self._manager.catalogs.items() if tier not in suspended]
            for catalog in catalogs:
                catalog.expect(keys)
            return [any(key in catalog for catalog in catalogs) for key in keys]

    def _find(self, keys: Sequence[Key]) -> Match:
        self._start_moves()  # and with it, suspend or resume the tiers
        return self._manager.lookup(keys, wait_for_writers=False)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def put(self, keys: Sequence[Key], pages: Sequence[Page], deadline: float) -> list[bool]:
        """Copy pages in. True for each that is kept: with a near tier as soon as it is there, else when it is in the
        first tier behind it."""
        with self._in_use() as is_open:
            if not is_open or self._is_reader or not (self._has_near_tier or self._bypass):
                return [False] * len(keys)
            generation = self._manager.generation
            kept: set[Key] = set()
            for at in range(0, len(keys), self._group):
                group = dict(zip(keys[at : at + self._group], pages[at : at + self._group], strict=True))
                kept |= self._put_group(group, deadline, generation)
                if not kept.issuperset(group):
                    break
            if self._bypass is None:
                return [key in kept for key in keys]
            with self._changed:
                target = self._manager.catalogs[self._bypass.target]
                self._changed.wait_for(lambda: not any(map(target.is_writing, keys)), deadline - time.monotonic())
                return [key in target for key in keys]

    def _put_group(self, group: Mapping[Key, Page], deadline: float, generation: bytes) -> set[Key]:
        """The pages that are kept or, without a near tier, on their way to the tier behind it."""
        near, edge = self._manager.near, self._bypass
        target = near if edge is None else self._manager.catalogs[edge.target]
        offered: set[Key] = set()  # to the edge
        while True:
            with self._changed:
                if self._manager.generation != generation:
                    return set()
                self.leader.clock.tick()
                fresh = [key for key in group if not target.holds(key) and not near.holds(key)]
                if edge is not None:
                    # In the staging buffer, and not in the target: that write failed, or the target has evicted it.
                    again = [key for key in group if key in near and not target.holds(key) and key not in offered]
                    edge.stored(again)
                    offered.update(again)
                plan = self.leader.offload(fresh, range(len(fresh))) if fresh else None
                self._start_moves()
                if plan is None:
                    left = [key for key in group if not target.holds(key)]
                    if not self._can_wait(fresh, left) or not self._changed.wait(deadline - time.monotonic()):
                        return set(group).difference(left)
                    continue
            began, is_good = time.monotonic(), False
            try:
                for i, slot in zip(plan.copy.blocks, plan.copy.slots, strict=True):
                    gather(group[fresh[i]], self._address(slot))
                is_good = True
            finally:
                with self._changed:
                    result = StoreResult(plan.id, is_good, time.monotonic() - began)
                    self._apply(Report(0, stores=[result]))
                    published = [key for key in fresh if key in near]
                    offered.update(published)  # by the leader
                    if self._log is not None:
                        self._log.finished("", 0, published)  # a later miss of these is an eviction
                    self._start_moves()

    def _can_wait(self, fresh: Sequence[Key], left: Sequence[Key]) -> bool:
        """Whether waiting brings pages of a put on: ``fresh`` ones wait for room, and others for their turn."""
        edge = self._bypass
        if edge is None:
            return bool(left)
        return bool(left) and not edge.is_suspended and (bool(fresh) or edge.queued_blocks > 0)

    def _start_moves(self) -> None:
        """Move pages on to other tiers, as far as the edges allow."""
        if plans := self.leader.plan_moves():
            self._moves.start(plans)
            self._changed.notify_all()

    # -- bringing back ------------------------------------------------------------------------------------------------

    def get(self, keys: Sequence[Key], pages: Sequence[Page], patience: float) -> list[bool]:
        """Copy pages out, up to the first that cannot be had. Gives up a store from which nothing comes for
        ``patience`` seconds, or which takes longer than computing. Writes to no page after the call has returned."""
        with self._in_use() as is_open:
            generation = self._manager.generation
            arrived = self._load(keys, pages, patience) if is_open else 0
            with self._changed:
                if self._manager.generation != generation:
                    arrived = 0  # a clear came in between: the pages are the KV of old weights
                self.leader.clock.tick()
                self.leader.touch(keys[:arrived], Turn(found=arrived))
                self.leader.used(keys[:arrived])
                self._start_moves()
        return [True] * arrived + [False] * (len(keys) - arrived)

    def _load(self, keys: Sequence[Key], pages: Sequence[Page], patience: float) -> int:
        """How many pages from the first on have arrived."""
        arrived = begun = 0
        loads: deque[PageLoad] = deque()
        try:
            while True:
                # Two at a time: a store reads the pages of one while those of the other are copied.
                while begun < len(keys) and len(loads) < 2:
                    part = slice(begun, begun + self._load_pages)
                    plan = self._plan_load(keys[part], 0.0 if loads else patience)
                    if plan is None:
                        break
                    load = PageLoad(plan, pages[part], self._slab, self._stores, patience)
                    loads.append(load)
                    load.advance()
                    is_whole = len(load.plan.blocks) == len(keys[part])
                    begun = begun + len(load.plan.blocks) if is_whole else len(keys)
                if not loads:
                    return arrived
                loads[0].carry_out()
                load = loads.popleft()
                came = self._end_load(load)
                arrived += came
                if came < len(load.plan.blocks):
                    return arrived
        finally:
            for load in loads:
                load.give_up("the load ended before it")
                self._end_load(load)

    def _plan_load(self, keys: Sequence[Key], patience: float) -> LoadPlan | None:
        """None when the first page is not there, or the slab has no room for pages of a staged tier in time."""
        with self._changed:
            match = self._find(keys)
            near = self._manager.near
            if any(run.tier != NEAR.name for run in match.runs):
                if not self._changed.wait_for(lambda: near.available >= match.blocks, patience):
                    return None
                match = self._find(keys)
            if not match.blocks:
                return None
            seconds = 0.0
            if self._has_deadline:
                computing = self.cost.compute_seconds(0, match.blocks * self.page_tokens)
                seconds = max(computing, SHORTEST_LOAD_SECONDS)
            return self.leader.onboard(match, "", range(match.blocks), in_step=False, deadline_seconds=seconds)

    def _end_load(self, load: PageLoad) -> int:
        """Report a load to the leader; returns how many of its pages from the first on have arrived."""
        result = load.result()
        with self._changed:
            self._apply(Report(0, loads=[result]))
            if result.late:
                self._late.append(load)
            for reason in load.reasons:
                self._fault(reason)
        return min((*result.bad, *result.missed), default=len(load.plan.blocks))

    # -- housekeeping -------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every page, because the weights may have changed.

        The name of the cache covers the weights that were loaded at start, so this process keeps nothing more for the
        next start and shows nothing more to other ranks. See :meth:`~kvbm.runtime.leader.Leader.reset`.
        """
        with self._changed:
            self.leader.reset()
            self._changed.notify_all()

    def close(self) -> None:
        """Finish what is under way and let go of memory and files. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._users)
        self._ends_at = deadline = time.monotonic() + bounded.DISK_END_SECONDS
        self._thread.join(bounded.DISK_END_SECONDS)
        answered = [store.close(max(1.0, deadline - time.monotonic())) for store in self._stores.values()]
        self._manager.close()
        if all(answered):
            self._slab.close()
        else:
            keep_until_exit(self._slab)  # a store may still read and write it

    @contextmanager
    def _in_use(self) -> Iterator[bool]:
        """Keeps :meth:`close` from freeing the memory while a call copies pages. False: it is closed already."""
        with self._changed:
            is_open = not self._closing
            self._users += is_open
        try:
            yield is_open
        finally:
            if is_open:
                with self._changed:
                    self._users -= 1
                    self._changed.notify_all()

    def _apply(self, report: Report) -> None:
        self.leader.apply([report])
        if self._is_reader:
            self._manager.near.clear()  # only the writer hears when its pages are cleared
        self._changed.notify_all()

    def _address(self, slot: int) -> int:
        return self._slab.address + slot * self._slab.slot_bytes

    def _fault(self, reason: str, times: int = 1) -> None:
        if self._note is not None:
            self._note(reason, times)

    def _run(self) -> None:
        """The thread that reports writes, and reads that were given up, when they have ended."""
        while self._wait_for_work():
            with self._changed:
                operation = oldest(self._targets.values())
            if operation is not None:
                operation.wait(POLL_SECONDS)
            elif not self._moves.under_way:
                time.sleep(POLL_SECONDS)
            try:
                with self._changed:
                    if report := Report(0, loads=self._ended_loads(), moves=self._moves.take_ended()):
                        self._apply(report)
                        self._start_moves()
                    while self._faults:
                        self._fault(*self._faults.popitem())
            except Exception:  # without this thread no further page would reach a staged tier
                logger.exception("KVBM could not record writes that have ended; their pages are not found again")

    def _wait_for_work(self) -> bool:
        """False at the end, when no call puts pages any more and none waits that could still move on, or a store
        hangs."""
        if time.monotonic() > self._ends_at:
            return False
        with self._changed:
            while not self._moves.under_way and not self._late:
                self._start_moves()  # a circuit breaker may have closed
                if self._moves.under_way:
                    break
                if self._closing and not self._users:
                    return False
                self._changed.wait(_PROBE_SECONDS if self.leader.moves_under_way else None)
            return True

    def _ended_loads(self) -> list[LoadResult]:
        results = [result for load in self._late if (result := load.late_result()) is not None]
        self._late = [load for load in self._late if load.late]
        return results
