"""The worker: moves bytes on one rank and reports the results. No policy.

The engine's worker thread calls it, in the order that :mod:`kvbm.transfer.base` describes. Nothing raises into the
engine: a load that cannot be started is reported as failed. A failed in-step load is reported in the same step, before
the engine uses the step's results.

Blocks of staged tiers come through near slots (:mod:`kvbm.tiers.staged_read`), always outside of the step, and go there
from near slots when the leader sends a move. No step waits for a store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

from kvbm.plans import Copy, LoadPlan, LoadResult, Report, StepPlan, TierName
from kvbm.runtime.announcements import Announcements
from kvbm.runtime.escapes import EscapeSample
from kvbm.runtime.loads import Load, Part, Rest, Submission
from kvbm.runtime.moves import Moves
from kvbm.runtime.stores import Share, Stores
from kvbm.tiers.base import PersistentMemory
from kvbm.tiers.bounded import keep_until_exit
from kvbm.tiers.staged_read import StagedRead, StagedStore, expected_if_late, merge_copies
from kvbm.tracing import annotate
from kvbm.transfer.base import Copier, Ticket, When


class Outcome(NamedTuple):
    """Transfers that have ended since the last poll: the report for the leader, and the sets that the engine needs."""

    report: Report
    arrived: set[str]  # requests whose asynchronous loads are over, well or badly
    failed: set[str]  # those with at least one missing block
    bad_blocks: set[int]  # engine blocks that hold nothing usable


class Worker:
    def __init__(
        self,
        rank: int,
        copier: Copier,
        near_tier: TierName,
        near_slots: int,
        num_blocks: int,
        share: Share | None = None,
        stores: Iterable[StagedStore] = (),
        kept: PersistentMemory | None = None,
        sample: EscapeSample | None = None,
    ) -> None:
        """``kept``: the slab, where it outlives the engine. ``sample``: of packed blocks."""
        self.rank = rank
        self._copier = copier
        self._near_tier = near_tier
        self._near_slots = near_slots
        self._num_blocks = num_blocks
        self._tiers = {store.tier: store for store in stores}
        self._late: dict[int, Load] = {}  # over for the engine, while a store still writes to their near slots
        self._loads: dict[int, Load] = {}
        self._faults: Counter[str] = Counter()
        self._stores = Stores(share or Share(), kept, self._check_copy, self._faults, sample)
        self._moves = Moves(near_tier, self._tiers, self._check_slots, self._faults)
        self._by_layer: dict[int, Load] = {}  # loads that attention waits for layer by layer
        self._step_begun = True
        self._early: set[int] = set()  # loads that were begun before their step
        self._put_off: list[LoadPlan] = []  # loads that begin at the end of the step
        self.announcements = Announcements(copier)
        self._submission = Submission(copier, self._loads.values())
        self._plan = StepPlan()  # of the current step
        self._refused: set[int] = set()  # loads and stores of the current step that the engine's state forbids
        self._lost_blocks: set[int] = set()
        self.weight_changes = 0
        self._outdated = False  # the leader plans with blocks of weights that are gone

    def weights_changed(self) -> None:
        """The engine has new weights. Plans are refused until the leader has heard of it and forgotten every block."""
        self.weight_changes += 1
        self._outdated = True
        # Their requests would start to compute on KV of the old weights.
        for load in self._loads.values():
            if not load.plan.in_step and load not in self.announcements:
                load.spoil()
        try:
            self.end_prefetch()
        except Exception as error:
            self._fault("prefetch", error)

    def drain(self) -> None:
        """Wait until no copy that was submitted reads or writes the engine's cache. Loads that are not over count as
        failed: the engine is about to give their blocks away. Never raises."""
        try:
            for load in self._loads.values():
                if load not in self.announcements:
                    load.spoil()
            tickets = [part.ticket for load in self._loads.values() for part in load.parts]
            for ticket in (*tickets, *self._stores.tickets.values()):
                ticket.wait()
        except Exception as error:
            self._fault("drain", error)

    @property
    def copies(self) -> str:
        """How this rank's bytes are copied, in words."""
        return self._copier.name

    def begin(self, plan: StepPlan) -> None:
        """Before the engine writes anything in this step."""
        for load in self.announcements.due(plan, self._loads):
            try:
                self.announcements.hold(load)
            except Exception as error:
                self._fault("fence", error)
                self._outlast(load)
        self._step_begun = True
        if plan.changes_heard[self.rank : self.rank + 1] == [self.weight_changes]:
            self._outdated = False
        self._plan = plan
        self._moves.add(plan.moves)
        self._stores.record(plan.verdicts)
        if not plan:
            return
        reading = self._stores.reading(plan.fences)
        try:
            with annotate("copier.begin_step"):
                self._copier.begin_step(reading.values())
        except Exception as error:
            # Without the fences the engine could overwrite blocks that stores still read, and a load blocks in use.
            self._fault("fence", error)
            self._stores.spoil(reading)
            self._step_begun = False
        for ticket in self._stores.reading(plan.drain_stores).values():
            ticket.wait()
        self._start_ahead(plan)

    def prefetch(self, slots: list[int], tokens: int) -> bool:
        return self._submission.prefetch(slots, tokens)

    def end_prefetch(self) -> None:
        self._submission.end_prefetch()

    def start_early(self, load: LoadPlan) -> None:
        """Start a load before its step has been planned; the step plan that names it changes nothing then.

        For a leader in the same process and thread. Everything else about the load is as usual.
        """
        self._copier.begin_load()
        self._start([load], self._when(load))
        self._early.add(load.id)

    def refuse(self, plans: Iterable[int], blocks: Iterable[int] = ()) -> None:
        """Do not start these loads and stores of the current step. They are reported as missed: vLLM recomputes, and
        the blocks stay in their tiers. ``blocks`` of the engine hold nothing usable."""
        self._refused.update(plans)
        self._lost_blocks.update(blocks)

    def start_loads(self, plan: StepPlan) -> None:
        """Start the loads that a step waits for. A load that cannot be started is reported as failed."""
        with self._spoiling(plan.loads):
            self._start_loads(plan)

    def _start_loads(self, plan: StepPlan) -> None:
        """As one: layer 1 of every request comes before layer 2 of any."""
        groups: dict[When, list[LoadPlan]] = {}
        for load in plan.loads:
            if load.id in self._early:
                self._early.remove(load.id)
            elif load.id in self._refused:
                self._refused.remove(load.id)
                refused = self._loads[load.id] = Load(load, self._near_tier)
                refused.missed.update(range(len(load.blocks)))
                self.end_prefetch()  # the prefetch may be of this load's slots, which may soon hold other blocks
            elif load.in_step:
                groups.setdefault(self._when(load), []).append(load)
            else:
                self._put_off.append(load)
        for when in (When.NOW, When.BY_LAYER):
            if when in groups:
                self._start(groups[when], when)

    def _when(self, load: LoadPlan) -> When:
        return When.LATER if not load.in_step else When.BY_LAYER if load.layered else When.NOW

    def _start_ahead(self, plan: StepPlan) -> None:
        """Begin loads that no step waits for before the forward pass of a long step, so that the bus is not idle until
        its end. In a short step this would delay decoding requests too much. Loads that the step waits for go first."""
        waiting = [load for load in plan.loads if load.id not in self._early]
        if not self._step_begun or not self._submission.steps_are_long or any(load.in_step for load in waiting):
            return
        if plan.adapters:
            return  # the step may refuse some
        near = [load for load in waiting if {copy.tier for copy in load.copies} == {self._near_tier}]
        near = [load for load in near if load.id not in self._refused]
        with self._spoiling(near):
            self._early.update(load.id for load in near)
            for load in near:
                self._start([load], When.LATER)

    def _start_put_off(self) -> None:
        """Start the loads that no step waits for: milliseconds of work, which the requests that decode would notice
        before their step's forward pass has been submitted, but not after."""
        loads, self._put_off = self._put_off, []
        if not loads:
            return
        with self._spoiling(loads):
            for load in loads:
                self._start([load], When.LATER)
        # If the load of the prefetched slots did not begin, the slots may soon hold other blocks.
        self.end_prefetch()

    @contextmanager
    def _spoiling(self, loads: list[LoadPlan]) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._fault("load", error)
            for load in loads:
                self._loads.setdefault(load.id, Load(load, self._near_tier)).spoil()

    def _spoil(self, load: Load, error: Exception) -> None:
        self._fault("load", error)
        load.spoil()

    def wait_layer(self, layer: str) -> None:
        if not self._by_layer:
            return
        try:
            self._copier.wait_layer(layer)
        except Exception as error:
            self._fault("load", error)
            for load in self._by_layer.values():
                load.spoil()

    def start_stores(self, plan: StepPlan) -> None:
        """After the forward pass has been submitted."""
        self._end_loads(plan)
        for store in plan.stores:
            if store.id in self._refused:
                self._refused.remove(store.id)
                self._stores.refuse(store)
            else:
                self._stores.start(store, self._copier)
        if plan is self._plan:
            self._moves.start_due()
        else:
            self._moves.start(plan.moves)

    def poll(self) -> Outcome:
        """Everything that has ended. Never waits, but for in-step loads that have failed. Ends a step."""
        self._submission.step_ended()
        self._submission.go_on(self._spoil)
        self._start_put_off()
        self._moves.start_due()
        self._end_loads(self._plan)  # with a draft model vLLM asks before it has started this step's stores
        self._advance()
        loads = self._collect_late()
        arrived: set[str] = set()
        failed: set[str] = set()
        bad_blocks, self._lost_blocks = self._lost_blocks, set()
        for load in list(self._loads.values()):
            # A load by layer is not over before its forward pass, which may show that it came too late.
            result = None if load.plan.id in self._by_layer else self._result(load)
            if result is None:
                continue
            del self._loads[load.plan.id]
            blocks = load.plan.blocks
            bad_blocks.update(blocks[position] for position in (*result.bad, *result.missed))
            loads.append(result)
            if not self.announcements.ended(load) and not load.plan.in_step:
                arrived.add(load.plan.request)
                if result.bad or result.missed:
                    failed.add(load.plan.request)
        arrived |= self.announcements.make(self._loads.values(), self._submission.step_seconds)
        stores, moves = self._stores.take_ended(), self._moves.take_ended()
        news = self.weight_changes if self._outdated else 0  # until the leader has heard of it: a report may get lost
        report = Report(self.rank, loads, stores, dict(self._faults), moves, weight_changes=news)
        self._faults.clear()
        return Outcome(report, arrived, failed, bad_blocks)

    def _advance(self) -> None:
        """Let staged reads go on, and give up those that are late."""
        staged = [load for load in self._loads.values() if load.staged]
        for load in staged:
            for read in load.staged:
                assert load.send is not None
                read.advance(load.send)
        for load in staged:
            now, deadline = load.staged[0].store.clock(), load.plan.deadline_seconds
            waited = now - load.began
            expected = expected_if_late(load.staged, deadline, now) if deadline else None
            late = expected is not None or (deadline and waited > deadline)
            for read in load.staged:
                stall = min(read.store.stall_seconds, load.plan.stall_seconds or inf)
                if late:
                    reason = "slower than computing"
                elif now - max(load.began, read.store.heard_at) > stall:
                    reason = f"nothing came for {stall:g} s"
                else:
                    continue
                if not read.given_up and not read.done():
                    load.waited, load.expected = waited, max(waited, expected or 0.0)
                read.give_up(f"gave up waiting for the {read.store.tier} tier: {reason}")

    def _collect_late(self) -> list[LoadResult]:
        results = [result for load in self._late.values() if (result := load.late_result()) is not None]
        for result in results:
            del self._late[result.id]
        return results

    @property
    def keeping(self) -> bool:
        """Blocks are on their way to a tier, or a store still owes a read that was given up."""
        return self._stores.under_way or self._moves.under_way or bool(self._late)

    def take_step(self, plan: StepPlan) -> Report:
        """A step without a forward pass, which the leader takes in place of an engine that ends."""
        self.begin(plan)
        self.start_stores(plan)
        return self.poll().report

    def hurry_stores(self) -> None:
        """A flush has waited for a store in vain: :meth:`close` does not wait for it a second time."""
        for store in self._tiers.values():
            store.close_seconds = 1.0

    def close(self) -> None:
        closed = [store.close() for store in self._tiers.values()]
        if all(closed):
            self._copier.close()
        else:
            keep_until_exit(self._copier)  # and with it the slab, which the disk may still read and write

    def _fault(self, what: str, error: Exception) -> None:
        self._faults[f"{what}: {type(error).__name__}: {error}"] += 1

    def _result(self, load: Load) -> LoadResult | None:
        """How a load has ended; None while it is under way."""
        try:
            if not load.done():
                return None
            tickets = [part.ticket for part in load.parts]
            self._faults.update(f"load: {reason}" for reason in {ticket.reason for ticket in tickets} if reason)
            for read in load.staged:
                self._faults.update(f"{read.store.tier} load: {reason}" for reason in read.reasons if reason)
            result = load.result()
        except Exception as error:
            self._fault("load", error)
            self._outlast(load)
            load.spoil()
            result = LoadResult(load.plan.id, sorted(load.bad), missed=sorted(load.missed), late=load.late)
        if result.late:
            self._late[load.plan.id] = load
        return result

    def _outlast(self, load: Load) -> None:
        """Wait for every copy of a failed load: none may still write when other requests own its blocks and slots."""
        for part in load.parts:
            try:
                part.ticket.wait()
            except Exception as error:
                self._fault("load", error)

    def _start(self, plans: list[LoadPlan], when: When) -> None:
        """One transfer for all these plans. A load that cannot be started has failed."""
        loads: list[Load] = []
        slots: list[int] = []
        blocks: list[int] = []
        places: list[tuple[Load, int, int, int]] = []
        after: dict[int, Ticket] = {}
        for plan in plans:
            load = self._loads[plan.id] = Load(plan, self._near_tier)
            loads.append(load)
            if when is When.BY_LAYER:
                self._by_layer[plan.id] = load
            after.update(self._stores.reading(plan.after))
            first = 0
            staged: dict[TierName, list[tuple[int, Copy]]] = {}
            for copy in plan.copies:
                try:
                    self._check_copy(copy)
                    if copy.tier == self._near_tier:
                        places.append((load, first, len(copy.blocks), len(blocks)))
                        slots += copy.slots
                        blocks += copy.blocks
                    else:
                        self._check_staged(copy, when)
                        staged.setdefault(copy.tier, []).append((first, copy))
                except Exception as error:
                    near = copy.tier == self._near_tier
                    (load.bad if near else load.missed).update(range(first, first + len(copy.blocks)))
                    self._fault("load", error)
                first += len(copy.blocks)
            if staged:
                self._start_staged_reads(load, staged)
        if not blocks:
            return
        try:
            if not self._step_begun:
                raise RuntimeError("not begun, because the fence before it failed")
            cuts = self._submission.cuts(slots) if when is When.LATER and len(places) == 1 else []
            if len(cuts) > 1:
                load, first, _, _ = places[0]
                tickets = list(after.values())
                rest = (Rest(first + start, slots[start:end], blocks[start:end], tickets) for start, end in cuts)
                self._submission.take_in(load, rest, self._spoil)
                return
            ticket = self._submission.submit(slots, blocks, after.values(), when, sum(plan.tokens for plan in plans))
        except Exception as error:
            self._fault("load", error)
            for load in loads:
                load.spoil()
            return
        for load, first, count, offset in places:
            load.parts.append(Part(first, count, ticket, offset, count / len(blocks)))

    def _check_staged(self, copy: Copy, when: When) -> None:
        """Whether blocks can come from this tier now."""
        if copy.tier not in self._tiers or len(copy.tags) != len(copy.slots):
            raise ValueError(f"blocks of the {copy.tier} tier cannot be loaded here")
        if when is not When.LATER or not self._step_begun:
            raise RuntimeError(f"a load from the {copy.tier} tier cannot begin in this step")
        if copy.via:
            self._check_slots(self._near_tier, copy.via)

    def _start_staged_reads(self, load: Load, copies: Mapping[TierName, list[tuple[int, Copy]]]) -> None:
        load.began = next(self._tiers[tier].clock() for tier in copies)
        after = list(self._stores.reading(load.plan.after).values())

        def send(slots: list[int], blocks: list[int]) -> Ticket:
            return self._submission.submit(slots, blocks, after, When.LATER, load.plan.tokens)

        load.send = send
        load.staged = [StagedRead(self._tiers[tier], part) for tier in copies for part in merge_copies(copies[tier])]
        for read in load.staged:
            read.advance(send)

    def _end_loads(self, plan: StepPlan) -> None:
        """The step's forward pass has been submitted: did every layer wait for its blocks?"""
        for load in plan.loads:
            under_way = self._loads.get(load.id)
            if under_way is None or not load.in_step:
                continue
            if self._by_layer.pop(load.id, None) is not None and not self._was_awaited(under_way):
                under_way.spoil()
                self._faults["load: a layer was computed without waiting for its blocks"] += 1
            if under_way.bad:
                # The engine gets the bad blocks in this step, and may write to them at once: so all copies into
                # them must have ended. This is the only place where a step waits for a copy.
                self._outlast(under_way)

    def _was_awaited(self, load: Load) -> bool:
        try:
            ended = [self._copier.end_load(part.ticket) for part in load.parts]  # every one of them, also after a False
            return all(ended)
        except Exception as error:
            self._fault("load", error)
            return False

    def _check_copy(self, copy: Copy) -> None:
        slots, blocks = copy.slots, copy.blocks
        if self._outdated:
            raise RuntimeError("the weights have changed since this was planned")
        # A wrong number here would copy another request's KV, or overwrite it; nothing later could notice.
        if len(slots) != len(blocks) or not slots:
            raise ValueError(f"plan with {len(slots)} slots for {len(blocks)} blocks")
        self._check_slots(copy.tier, slots)
        if min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise ValueError(f"plan outside of the engine's {self._num_blocks} blocks")

    def _check_slots(self, tier: TierName, slots: list[int]) -> None:
        store = self._tiers.get(tier)
        if store is not None and not store.slots:
            return  # a keyed tier: its places are the catalog's own
        size = self._near_slots if tier == self._near_tier else 0 if store is None else store.slots
        if not slots or min(slots) < 0 or max(slots) >= size:
            raise ValueError(f"plan outside of the {size} slots of the {tier} tier")
