"""The worker: moves bytes on one rank and reports what became of them. No policy.

The engine's worker thread calls it, in the order that :mod:`kvbm.transfer.base` describes. Nothing raises into the
engine: a load that cannot even be started is a load that failed, and is reported like any other. The engine hears of an
in-step load that failed in that very step, before it believes what it has computed.

Blocks of staged tiers come through near slots (:mod:`kvbm.tiers.staged_read`), always outside of the step, and go there
from near slots when the leader says so. Whatever a store does, no step waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from kvbm.plans import (
    Copy,
    LoadPlan,
    LoadResult,
    MovePlan,
    MoveResult,
    Report,
    StepPlan,
    StorePlan,
    StoreResult,
    TierName,
)
from kvbm.runtime.loads import Load, Part, Rest, Submission
from kvbm.tiers.base import Operation
from kvbm.tiers.bounded import keep_until_exit
from kvbm.tiers.host.persistent_slab import Hashes, PersistentSlab
from kvbm.tiers.staged_read import StagedRead, StagedStore, expected_if_late, merge_copies
from kvbm.tracing import annotate
from kvbm.transfer.base import Copier, Ticket, When


class Outcome(NamedTuple):
    """What has ended since the last poll, as the leader and as the engine need to hear it."""

    report: Report
    arrived: set[str]  # requests whose asynchronous loads are over, well or badly
    failed: set[str]  # those of them of which something did not arrive
    bad_blocks: set[int]  # engine blocks that hold nothing usable


class Share(NamedTuple):
    """Which part of every store is this rank's to write, where several ranks keep one copy among them.

    A stretch, so that neighbours stay together; and another one with every plan, so that short stores go round.
    """

    place: int = 0
    writers: int = 1  # the first so many write; the others have nothing to do

    def of(self, plan: StorePlan) -> slice:
        if self.place >= self.writers:
            return slice(0, 0)
        turn, count = (self.place + plan.id) % self.writers, len(plan.copy.blocks)
        return slice(count * turn // self.writers, count * (turn + 1) // self.writers)


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
        kept: PersistentSlab | None = None,
    ) -> None:
        """``kept``: the slab, where it outlives the engine."""
        self.rank = rank
        self._share = share or Share()
        self._copier = copier
        self._near_tier = near_tier
        self._near_slots = near_slots
        self._num_blocks = num_blocks
        self._tiers = {store.tier: store for store in stores}
        self._late: dict[int, Load] = {}  # over for the engine, while a store still writes to their near slots
        self._moves: dict[int, Operation] = {}
        self._failed_moves: list[MovePlan] = []
        self._due_moves: list[MovePlan] = []  # of the current step, not started yet
        self._loads: dict[int, Load] = {}
        self._stores: dict[int, Ticket] = {}
        self._kept = kept
        self._to_hash: dict[int, Copy] = {}
        self._hashing: dict[int, tuple[Hashes, float]] = {}  # and the seconds that the store took
        self._hashed: dict[int, Hashes] = {}  # until the leader says whether they were good
        self._failed_stores: list[int] = []
        self._idle_stores: list[int] = []  # other ranks write them
        self._faults: Counter[str] = Counter()
        self._by_layer: dict[int, Load] = {}  # loads that attention waits for layer by layer
        self._spoiled_stores: set[int] = set()  # the engine may have written over their source
        self._step_begun = True
        self._early: set[int] = set()  # loads that were begun before their step
        self._put_off: list[LoadPlan] = []  # loads that begin at the end of the step
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
            if not load.plan.in_step:
                load.spoil()
        try:
            self.end_prefetch()
        except Exception as error:
            self._fault("prefetch", error)

    @property
    def copies(self) -> str:
        """How this rank's bytes are copied, in words."""
        return self._copier.name

    def begin(self, plan: StepPlan) -> None:
        """Before the engine writes anything in this step."""
        self._step_begun = True
        if plan.changes_heard[self.rank : self.rank + 1] == [self.weight_changes]:
            self._outdated = False
        self._plan = plan
        self._due_moves = [*self._due_moves, *plan.moves]  # those of a step that was never ended are still due
        self._record(plan.verdicts)
        if not plan:
            return
        reading = {i: self._stores[i] for i in plan.fences if i in self._stores}
        try:
            with annotate("copier.begin_step"):
                self._copier.begin_step(reading.values())
        except Exception as error:
            # Nothing holds the engine back from what these still read, nor a load from what the engine still uses.
            self._fault("fence", error)
            self._spoiled_stores.update(reading)
            self._step_begun = False
        for store in plan.drain_stores:
            if store in self._stores:
                self._stores[store].wait()
        self._fetch_ahead(plan)

    def prefetch(self, slots: list[int], tokens: int, whole: bool = False) -> bool:
        return self._submission.prefetch(slots, tokens, whole)

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
        """Start the loads that a step waits for. Whatever cannot be started has failed, and will be reported so."""
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
                self.end_prefetch()  # it may have been for this load, and its slots may soon hold other blocks
            elif load.in_step:
                groups.setdefault(self._when(load), []).append(load)
            else:
                self._put_off.append(load)
        for when in (When.NOW, When.BY_LAYER):
            if when in groups:
                self._start(groups[when], when)

    def _when(self, load: LoadPlan) -> When:
        return When.LATER if not load.in_step else When.BY_LAYER if load.layered else When.NOW

    def _fetch_ahead(self, plan: StepPlan) -> None:
        """Begin with the first load that will be put off: the bus need not wait for the end of a step that takes long.
        In a short one those who decode would notice it more than the load. Not before loads that the step waits for."""
        if not self._step_begun or not self._submission.steps_are_long:
            return
        waiting = [load for load in plan.loads if load.id not in self._early]
        if not waiting or any(load.in_step for load in waiting):
            return
        copies = waiting[0].copies
        if len(copies) != 1 or copies[0].tier != self._near_tier or self._submission.keeps_up:
            return
        try:
            self._check(self._near_tier, copies[0].slots, copies[0].blocks)
            _, end = self._submission.cuts(copies[0].slots)[0]
            self.prefetch(copies[0].slots[:end], 0, whole=True)
        except Exception as error:
            self._fault("prefetch", error)  # the load itself will show what can be had

    def _start_put_off(self) -> None:
        """Start the loads that no step waits for: milliseconds of work, which the requests that decode would notice
        before their step's forward pass has been submitted, but not after."""
        loads, self._put_off = self._put_off, []
        if not loads:
            return
        with self._spoiling(loads):
            for load in loads:
                self._start([load], When.LATER)
        # Should the load for which it was fetched not have come about, its slots may soon hold something else.
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
                self._failed_stores.append(store.id)
                continue
            try:
                self._check(store.copy.tier, store.copy.slots, store.copy.blocks)
                mine = self._share.of(store)
                if mine.start == mine.stop:
                    self._idle_stores.append(store.id)
                    continue
                with annotate("copier.store"):
                    self._stores[store.id] = self._copier.store(store.copy.blocks[mine], store.copy.slots[mine])
                if self._kept is not None and store.copy.tags:
                    self._to_hash[store.id] = store.copy
            except Exception as error:
                self._failed_stores.append(store.id)
                self._fault("store", error)
        if plan is self._plan:
            self._start_due_moves()
        else:
            self._start_moves(plan.moves)

    def _start_due_moves(self) -> None:
        """Once a step: at its end or, where that comes later or not at all, with the next poll. vLLM polls before the
        end where there is a draft model, and ends no step that has no forward pass."""
        due, self._due_moves = self._due_moves, []
        self._start_moves(due)

    def _start_moves(self, moves: list[MovePlan]) -> None:
        for move in moves:
            try:
                self._moves[move.id] = self._move(move)
            except Exception as error:
                self._failed_moves.append(move)
                self._fault("spill", error)

    def _move(self, move: MovePlan) -> Operation:
        if move.source != self._near_tier or move.target not in self._tiers:
            raise RuntimeError(f"this rank cannot move blocks from {move.source} to {move.target}")
        self._check_slots(move.source, move.slots)
        self._check_slots(move.target, move.targets)
        return self._tiers[move.target].write(move.targets, move.slots, move.tags)

    def poll(self) -> Outcome:
        """Everything that has ended. Never waits, but for in-step loads that have failed. Ends a step."""
        self._submission.step_ended()
        self._submission.go_on(self._spoil)
        self._start_put_off()
        self._start_due_moves()
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
            if not load.plan.in_step:
                arrived.add(load.plan.request)
                if result.bad or result.missed:
                    failed.add(load.plan.request)
        stores = [StoreResult(i, ok=False) for i in self._failed_stores]
        stores += [StoreResult(i) for i in self._idle_stores]
        self._failed_stores.clear()
        self._idle_stores.clear()
        for i, ticket in list(self._stores.items()):
            try:
                if not ticket.done():
                    continue
                ok, reason, seconds = not ticket.bad, ticket.reason, ticket.seconds
            except Exception as error:
                ok, reason, seconds = False, f"{type(error).__name__}: {error}", 0.0
            del self._stores[i]
            ok = ok and i not in self._spoiled_stores
            self._spoiled_stores.discard(i)
            if not self._hash(i, ok, seconds):
                stores.append(StoreResult(i, ok, seconds))
            if reason:
                self._faults[f"store: {reason}"] += 1
        stores += self._ended_hashes()
        moves = self._ended_moves()
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
                stall = read.store.stall_seconds
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
        """Loads whose given-up reads have ended by now: their near slots are free."""
        results = []
        for load in list(self._late.values()):
            for read in load.staged:
                read.collect()
            if not load.late:
                del self._late[load.plan.id]
                bad: set[int] = set().union(*(read.bad for read in load.staged))
                missed = load.missed.union(*(read.missed for read in load.staged))
                results.append(LoadResult(load.plan.id, sorted(bad), missed=sorted(missed)))
        return results

    def _hash(self, store: int, ok: bool, seconds: float) -> bool:
        """Begin to hash the blocks of a store, where the next engine shall find them. The store counts as confirmed
        when that is over: nothing writes to its slots before."""
        copy = self._to_hash.pop(store, None)
        if copy is None or not ok or self._kept is None:
            return False
        try:
            self._hashing[store] = self._kept.hash(copy.slots, copy.tags), seconds
        except Exception as error:
            self._fault("keep", error)
            return False
        return True

    def _ended_hashes(self) -> list[StoreResult]:
        results = []
        for i, (hashes, seconds) in list(self._hashing.items()):
            if hashes.done():
                del self._hashing[i]
                if not hashes.bad:
                    self._hashed[i] = hashes
                results.append(StoreResult(i, seconds=seconds))
        return results

    def _record(self, verdicts: Mapping[int, bool]) -> None:
        for store, good in verdicts.items():
            hashes = self._hashed.pop(store, None)
            if good and hashes is not None and self._kept is not None:
                try:
                    self._kept.record(hashes)
                except Exception as error:
                    self._fault("keep", error)

    def _ended_moves(self) -> list[MoveResult]:
        results = [MoveResult(move.id, list(range(len(move.slots)))) for move in self._failed_moves]
        self._failed_moves.clear()
        for i, operation in list(self._moves.items()):
            if operation.done():
                del self._moves[i]
                results.append(MoveResult(i, operation.bad, operation.seconds))
                if operation.reason:
                    self._faults[f"spill: {operation.reason}"] += 1
        return results

    @property
    def keeping(self) -> bool:
        """Blocks are on their way to a tier, or a store still owes a read that was given up."""
        return bool(self._stores or self._hashing or self._moves or self._due_moves or self._late)

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
        """A copy that has failed, or of which nobody can say whether it is over, must not go on when others have its
        blocks and slots."""
        for part in load.parts:
            try:
                part.ticket.wait()
            except Exception as error:
                self._fault("load", error)

    def _start(self, plans: list[LoadPlan], when: When) -> None:
        """One transfer for all these plans. What cannot be started has failed."""
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
            after.update((i, self._stores[i]) for i in plan.after if i in self._stores)
            first = 0
            staged: dict[TierName, list[tuple[int, Copy]]] = {}
            for copy in plan.copies:
                try:
                    self._check(copy.tier, copy.slots, copy.blocks)
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
        after = [self._stores[i] for i in load.plan.after if i in self._stores]

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
                # The engine must hear of it in this very step, and may then write to the blocks at once: so whatever is
                # still being copied into them has to be over. This is the one place where a step waits for a copy.
                self._outlast(under_way)

    def _was_awaited(self, load: Load) -> bool:
        try:
            ended = [self._copier.end_load(part.ticket) for part in load.parts]  # every one of them, also after a False
            return all(ended)
        except Exception as error:
            self._fault("load", error)
            return False

    def _check(self, tier: TierName, slots: list[int], blocks: list[int]) -> None:
        if self._outdated:
            raise RuntimeError("the weights have changed since this was planned")
        # A wrong number here would copy another request's KV, or overwrite it; nothing later could notice.
        if len(slots) != len(blocks) or not slots:
            raise ValueError(f"plan with {len(slots)} slots for {len(blocks)} blocks")
        self._check_slots(tier, slots)
        if min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise ValueError(f"plan outside of the engine's {self._num_blocks} blocks")

    def _check_slots(self, tier: TierName, slots: list[int]) -> None:
        store = self._tiers.get(tier)
        if store is not None and not store.slots:
            return  # a keyed tier: its places are the catalog's own
        size = self._near_slots if tier == self._near_tier else 0 if store is None else store.slots
        if not slots or min(slots) < 0 or max(slots) >= size:
            raise ValueError(f"plan outside of the {size} slots of the {tier} tier")
