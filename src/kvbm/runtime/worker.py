"""The worker: moves bytes on one rank and says what became of them. No policy.

Called from the engine's worker thread, in the order :mod:`kvbm.transfer.base` describes. Nothing raises into the engine:
a load that cannot even be started is a load that failed, and is reported like any other.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvbm.plans import LoadPlan, LoadResult, Report, StepPlan, StoreResult, Tier
from kvbm.transfer.base import Copier, Ticket, When


class Outcome(NamedTuple):
    """What has ended since the last poll, as the leader and as the engine need to hear it."""

    report: Report
    arrived: set[str]  # requests whose asynchronous loads are over, well or badly
    bad_blocks: set[int]  # engine blocks that hold nothing usable


class _Part(NamedTuple):
    """A stretch of a load's blocks and the transfer that brings them."""

    first: int  # position in the plan of the first block
    count: int
    ticket: Ticket
    offset: int  # position in the transfer of that block


class _Load:
    """A load under way."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.parts: list[_Part] = []
        self.bad: set[int] = set()  # positions known to be lost whatever the transfers say

    def spoil(self) -> None:
        self.bad.update(range(len(self.plan.blocks)))

    def done(self) -> bool:
        return all(part.ticket.done() for part in self.parts)

    def lost(self) -> list[int]:
        """Positions that did not arrive; valid when done."""
        bad = set(self.bad)
        for part in self.parts:
            bad.update(part.first + p - part.offset for p in part.ticket.bad if part.offset <= p < part.offset + part.count)
        return sorted(bad)


class Worker:
    def __init__(self, rank: int, copier: Copier, slots: dict[Tier, int], num_blocks: int) -> None:
        self.rank = rank
        self._copier = copier
        self._slots = slots
        self._num_blocks = num_blocks
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, Ticket] = {}
        self._failed_stores: list[int] = []
        self._faults: Counter[str] = Counter()
        self._by_layer: list[_Load] = []  # loads of this step that attention waits for layer by layer

    def begin(self, plan: StepPlan) -> None:
        """Before the engine writes anything in this step."""
        if plan:
            self._copier.begin_step([self._stores[i] for i in plan.fences if i in self._stores])

    def start_loads(self, plan: StepPlan) -> None:
        """Start all loads of a step. Those the step needs go first, and as one: layer 1 of every request comes before
        layer 2 of any."""
        groups: dict[When, list[LoadPlan]] = {}
        for load in plan.loads:
            when = When.LATER if not load.in_step else When.BY_LAYER if load.layered else When.NOW
            groups.setdefault(when, []).append(load)
        for when in (When.NOW, When.BY_LAYER):
            if when in groups:
                loads = self._start(groups[when], when)
                if when is When.BY_LAYER:
                    self._by_layer = loads
        for load in groups.get(When.LATER, ()):
            self._start([load], When.LATER)

    def wait_layer(self, layer: str) -> None:
        if self._by_layer:
            self._copier.wait_layer(layer)

    def start_stores(self, plan: StepPlan) -> None:
        """After the forward pass has been submitted."""
        self._end_loads()
        for store in plan.stores:
            try:
                self._check(store.copy.tier, store.copy.slots, store.copy.blocks)
                self._stores[store.id] = self._copier.store(store.copy.blocks, store.copy.slots)
            except Exception as error:
                self._failed_stores.append(store.id)
                self._faults[f"store: {type(error).__name__}: {error}"] += 1

    def poll(self) -> Outcome:
        """Everything that has ended. Never waits."""
        loads: list[LoadResult] = []
        arrived: set[str] = set()
        bad_blocks: set[int] = set()
        for load in [load for load in self._loads.values() if load.done()]:
            del self._loads[load.plan.id]
            bad = load.lost()
            blocks = load.plan.blocks
            bad_blocks.update(blocks[position] for position in bad)
            seconds = max((part.ticket.seconds for part in load.parts), default=0.0)
            loads.append(LoadResult(load.plan.id, bad, seconds))
            self._faults.update(f"load: {reason}" for reason in {part.ticket.reason for part in load.parts} if reason)
            if not load.plan.in_step:
                arrived.add(load.plan.request)
        stores = [StoreResult(i, ok=False) for i in self._failed_stores]
        self._failed_stores.clear()
        for i in [i for i, ticket in self._stores.items() if ticket.done()]:
            ticket = self._stores.pop(i)
            stores.append(StoreResult(i, ok=not ticket.bad))
            if ticket.reason:
                self._faults[f"store: {ticket.reason}"] += 1
        report = Report(self.rank, loads, stores, dict(self._faults))
        self._faults.clear()
        return Outcome(report, arrived, bad_blocks)

    def close(self) -> None:
        self._copier.close()

    def _start(self, plans: list[LoadPlan], when: When) -> list[_Load]:
        """One transfer for all these plans. What cannot be started has failed."""
        loads: list[_Load] = []
        slots: list[int] = []
        blocks: list[int] = []
        places: list[tuple[_Load, int, int, int]] = []
        after: dict[int, Ticket] = {}
        for plan in plans:
            load = self._loads[plan.id] = _Load(plan)
            loads.append(load)
            after.update((i, self._stores[i]) for i in plan.after if i in self._stores)
            first = 0
            for copy in plan.copies:
                try:
                    self._check(copy.tier, copy.slots, copy.blocks)
                    places.append((load, first, len(copy.blocks), len(blocks)))
                    slots += copy.slots
                    blocks += copy.blocks
                except Exception as error:
                    load.bad.update(range(first, first + len(copy.blocks)))
                    self._faults[f"load: {type(error).__name__}: {error}"] += 1
                first += len(copy.blocks)
        if not blocks:
            return loads
        try:
            ticket = self._copier.load(slots, blocks, after.values(), when)
        except Exception as error:
            self._faults[f"load: {type(error).__name__}: {error}"] += 1
            for load in loads:
                load.spoil()
            return loads
        for load, first, count, offset in places:
            load.parts.append(_Part(first, count, ticket, offset))
        return loads

    def _end_loads(self) -> None:
        if not self._by_layer:
            return
        try:
            complete = self._copier.end_loads()
        except Exception as error:
            complete = False
            self._faults[f"load: {type(error).__name__}: {error}"] += 1
        if not complete:
            self._faults["load: a layer was computed without waiting for its blocks"] += 1
            for load in self._by_layer:
                load.spoil()
        self._by_layer = []

    def _check(self, tier: Tier, slots: list[int], blocks: list[int]) -> None:
        # A wrong number here would copy somebody else's KV, or scribble over it; nothing later could notice.
        size = self._slots.get(tier, 0)
        if len(slots) != len(blocks) or not slots:
            raise ValueError(f"plan with {len(slots)} slots for {len(blocks)} blocks")
        if min(slots) < 0 or max(slots) >= size or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise ValueError(f"plan outside of the {size} slots of {tier.name} or the {self._num_blocks} blocks of the engine")
