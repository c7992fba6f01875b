"""The worker: moves bytes on one rank and says what became of them. No policy.

Called from the engine's worker thread, in the order :mod:`kvbm.transfer.base` describes. Nothing raises into the
engine: a load that cannot even be started is a load that failed, and is reported like any other. The engine hears of an
in-step load that failed in that very step, before it believes what it has computed.

Blocks on disk come by way of host memory (:mod:`kvbm.runtime.disk`), always outside of the step, and go there from host
memory when the leader says so. Whatever the disk does, no step waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from kvbm.observe.nvtx import annotate
from kvbm.plans import (
    Copy,
    LoadPlan,
    LoadResult,
    Report,
    SpillPlan,
    SpillResult,
    StepPlan,
    StorePlan,
    StoreResult,
    Tier,
)
from kvbm.runtime.disk import Ascent, Disk, behind, joined
from kvbm.runtime.loads import Load, Part, Rest, Submission
from kvbm.storage.bounded import keep_until_exit
from kvbm.storage.disk import Operation
from kvbm.storage.kept import Hashes, KeptSlab
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
        slots: dict[Tier, int],
        num_blocks: int,
        share: Share | None = None,
        disk: Disk | None = None,
        kept: KeptSlab | None = None,
    ) -> None:
        """``kept``: the slab, where it outlives the engine."""
        self.rank = rank
        self._share = share or Share()
        self._copier = copier
        self._slots = slots if disk is None else {**slots, Tier.DISK: disk.slots}
        self._num_blocks = num_blocks
        self._disk = disk
        self._late: dict[int, Load] = {}  # over for the engine, while the disk still writes to their host slots
        self._spills: dict[int, Operation] = {}
        self._failed_spills: list[SpillPlan] = []
        self._due_spills: list[SpillPlan] = []  # of the current step, not started yet
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
        self._due_spills = [*self._due_spills, *plan.spills]  # a step that nobody has ended loses nothing
        self._record(plan.keeps)
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
        for store in plan.settle:
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
                refused = self._loads[load.id] = Load(load)
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
        if len(copies) != 1 or copies[0].tier is not Tier.HOST or self._submission.keeps_up:
            return
        try:
            self._check(Tier.HOST, copies[0].slots, copies[0].blocks)
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
                self._loads.setdefault(load.id, Load(load)).spoil()

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
            self._start_due_spills()
        else:
            self._start_spills(plan.spills)

    def _start_due_spills(self) -> None:
        """Once a step: at its end or, where that comes later or not at all, when somebody asks for results. vLLM asks
        before the end where there is a draft model, and ends no step that has no forward pass."""
        due, self._due_spills = self._due_spills, []
        self._start_spills(due)

    def _start_spills(self, spills: list[SpillPlan]) -> None:
        for spill in spills:
            try:
                self._spills[spill.id] = self._spill(spill)
            except Exception as error:
                self._failed_spills.append(spill)
                self._fault("spill", error)

    def _spill(self, spill: SpillPlan) -> Operation:
        if self._disk is None:
            raise RuntimeError("there is no disk tier here")
        self._check_slots(Tier.HOST, spill.slots)
        self._check_slots(Tier.DISK, spill.targets)
        return self._disk.write(spill.targets, spill.slots, spill.tags)

    def poll(self) -> Outcome:
        """Everything that has ended. Never waits, but for in-step loads that have failed. Ends a step."""
        self._submission.step_ended()
        self._submission.go_on(self._spoil)
        self._start_put_off()
        self._start_due_spills()
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
        spills = self._ended_spills()
        news = self.weight_changes if self._outdated else 0  # until the leader has heard of it: a report may get lost
        report = Report(self.rank, loads, stores, dict(self._faults), spills, weight_changes=news)
        self._faults.clear()
        return Outcome(report, arrived, failed, bad_blocks)

    def _advance(self) -> None:
        """Let loads from disk go on, and give up those that take too long."""
        disk = self._disk
        slow = [load for load in self._loads.values() if load.ascents]
        if disk is None or not slow:
            return
        for load in slow:
            for ascent in load.ascents:
                assert load.send is not None
                ascent.advance(load.send)
        now = disk.clock()
        for load in slow:
            waited = now - load.began
            expected = behind(load.ascents, load.plan.within, now) if load.plan.within else None
            if expected is not None or (load.plan.within and waited > load.plan.within):
                reason = "slower than computing"
            elif now - max(load.began, disk.heard_at) > disk.patience:
                reason = f"nothing came for {disk.patience:g} s"
            else:
                continue
            if not all(ascent.given_up for ascent in load.ascents):
                load.waited, load.expected = waited, max(waited, expected or 0.0)
            for ascent in load.ascents:
                ascent.give_up(f"the disk was given up: {reason}")

    def _collect_late(self) -> list[LoadResult]:
        """Loads whose given-up reads have ended by now: their host slots are free."""
        results = []
        for load in list(self._late.values()):
            for ascent in load.ascents:
                ascent.collect()
            if not load.owes:
                del self._late[load.plan.id]
                bad: set[int] = set().union(*(ascent.bad for ascent in load.ascents))
                missed = load.missed.union(*(ascent.missed for ascent in load.ascents))
                results.append(LoadResult(load.plan.id, sorted(bad), missed=sorted(missed)))
        return results

    def _hash(self, store: int, ok: bool, seconds: float) -> bool:
        """Begin to hash what a store has written, where that is to be found by the next engine. It counts as confirmed
        when that is over: nobody writes to its slots before."""
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

    def _ended_spills(self) -> list[SpillResult]:
        results = [SpillResult(spill.id, list(range(len(spill.slots)))) for spill in self._failed_spills]
        self._failed_spills.clear()
        for i, operation in list(self._spills.items()):
            if operation.done():
                del self._spills[i]
                results.append(SpillResult(i, operation.bad, operation.seconds))
                if operation.reason:
                    self._faults[f"spill: {operation.reason}"] += 1
        return results

    @property
    def keeping(self) -> bool:
        """Blocks are on their way to host memory or to disk, or the disk still owes a read that was given up."""
        return bool(self._stores or self._hashing or self._spills or self._due_spills or self._late)

    def take_step(self, plan: StepPlan) -> Report:
        """A step without a forward pass, which the leader takes in place of an engine that ends."""
        self.begin(plan)
        self.start_stores(plan)
        return self.poll().report

    def hurry_disk(self) -> None:
        """A flush has waited for the disk in vain: :meth:`close` does not wait for it a second time."""
        if self._disk is not None:
            self._disk.close_seconds = 1.0

    def close(self) -> None:
        if self._disk is None or self._disk.close():
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
            for ascent in load.ascents:
                self._faults.update(f"disk load: {reason}" for reason in ascent.reasons if reason)
            result = load.result()
        except Exception as error:
            self._fault("load", error)
            self._outlast(load)
            load.spoil()
            result = LoadResult(load.plan.id, sorted(load.bad), missed=sorted(load.missed), late=load.owes)
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
            load = self._loads[plan.id] = Load(plan)
            loads.append(load)
            if when is When.BY_LAYER:
                self._by_layer[plan.id] = load
            after.update((i, self._stores[i]) for i in plan.after if i in self._stores)
            first = 0
            slow: list[tuple[int, Copy]] = []
            for copy in plan.copies:
                try:
                    self._check(copy.tier, copy.slots, copy.blocks)
                    if copy.tier is Tier.HOST:
                        places.append((load, first, len(copy.blocks), len(blocks)))
                        slots += copy.slots
                        blocks += copy.blocks
                    else:
                        self._check_way(copy, when)
                        slow.append((first, copy))
                except Exception as error:
                    near = copy.tier is Tier.HOST
                    (load.bad if near else load.missed).update(range(first, first + len(copy.blocks)))
                    self._fault("load", error)
                first += len(copy.blocks)
            if slow:
                self._climb(load, slow)
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

    def _check_way(self, copy: Copy, when: When) -> None:
        """Whether blocks can come from this tier now."""
        if self._disk is None or copy.tier is not Tier.DISK or len(copy.tags) != len(copy.slots):
            raise ValueError(f"blocks of {copy.tier.name} cannot be loaded here")
        if when is not When.LATER or not self._step_begun:
            raise RuntimeError("a load from disk cannot begin in this step")
        if copy.via:
            self._check_slots(Tier.HOST, copy.via)

    def _climb(self, load: Load, copies: list[tuple[int, Copy]]) -> None:
        """Begin to bring blocks from disk."""
        assert self._disk is not None
        load.began = self._disk.clock()
        after = [self._stores[i] for i in load.plan.after if i in self._stores]

        def send(slots: list[int], blocks: list[int]) -> Ticket:
            return self._submission.submit(slots, blocks, after, When.LATER, load.plan.tokens)

        load.send = send
        load.ascents = [Ascent(self._disk, part) for part in joined(copies)]
        for ascent in load.ascents:
            ascent.advance(send)

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

    def _check(self, tier: Tier, slots: list[int], blocks: list[int]) -> None:
        if self._outdated:
            raise RuntimeError("the weights have changed since this was planned")
        # A wrong number here would copy somebody else's KV, or scribble over it; nothing later could notice.
        if len(slots) != len(blocks) or not slots:
            raise ValueError(f"plan with {len(slots)} slots for {len(blocks)} blocks")
        self._check_slots(tier, slots)
        if min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise ValueError(f"plan outside of the engine's {self._num_blocks} blocks")

    def _check_slots(self, tier: Tier, slots: list[int]) -> None:
        size = self._slots.get(tier, 0)
        if not slots or min(slots) < 0 or max(slots) >= size:
            raise ValueError(f"plan outside of {tier.name}'s {size} slots")
