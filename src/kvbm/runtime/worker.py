"""The worker: moves bytes on one rank and says what became of them. No policy.

Called from the engine's worker thread, in the order :mod:`kvbm.transfer.base` describes. Nothing raises into the engine:
a load that cannot even be started is a load that failed, and is reported like any other.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from kvbm.plans import LoadPlan, LoadResult, Report, StepPlan, StoreResult, Tier
from kvbm.transfer.base import Copier, Ticket


class Outcome(NamedTuple):
    """What has ended since the last poll, as the leader and as the engine need to hear it."""

    report: Report
    arrived: set[str]  # requests whose asynchronous loads are over, well or badly
    bad_blocks: set[int]  # engine blocks that hold nothing usable


class _Load(NamedTuple):
    plan: LoadPlan
    tickets: list[tuple[int, int, Ticket]]  # (first position, blocks, ticket) of each copy that could be started
    bad: list[int]  # positions that could not


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
        self._layers_wanted = False

    def begin(self, plan: StepPlan) -> None:
        """Before the engine writes anything in this step."""
        if plan:
            self._copier.begin_step([self._stores[i] for i in plan.fences if i in self._stores])

    def start_loads(self, plan: StepPlan) -> None:
        for load in plan.loads:
            self._start_load(load)
            self._layers_wanted |= load.in_step

    def wait_layer(self, layer: str) -> None:
        if self._layers_wanted:
            self._copier.wait_layer(layer)

    def start_stores(self, plan: StepPlan) -> None:
        """After the forward pass has been submitted. In-step loads are over for the engine from here on."""
        self._layers_wanted = False
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
        for load in [load for load in self._loads.values() if all(ticket.done() for _, _, ticket in load.tickets)]:
            del self._loads[load.plan.id]
            bad = list(load.bad)
            for first, _, ticket in load.tickets:
                bad.extend(first + position for position in ticket.bad)
                if ticket.reason:
                    self._faults[f"load: {ticket.reason}"] += 1
            blocks = load.plan.blocks
            bad_blocks.update(blocks[position] for position in bad)
            loads.append(LoadResult(load.plan.id, sorted(bad)))
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

    def _start_load(self, plan: LoadPlan) -> None:
        tickets: list[tuple[int, int, Ticket]] = []
        bad: list[int] = []
        after = [self._stores[i] for i in plan.after if i in self._stores]
        first = 0
        for copy in plan.copies:
            try:
                self._check(copy.tier, copy.slots, copy.blocks)
                ticket = self._copier.load(copy.slots, copy.blocks, after, plan.in_step)
                tickets.append((first, len(copy.blocks), ticket))
            except Exception as error:
                bad.extend(range(first, first + len(copy.blocks)))
                self._faults[f"load: {type(error).__name__}: {error}"] += 1
            first += len(copy.blocks)
        self._loads[plan.id] = _Load(plan, tickets, bad)

    def _check(self, tier: Tier, slots: list[int], blocks: list[int]) -> None:
        # A wrong number here would copy somebody else's KV, or scribble over it; nothing later could notice.
        size = self._slots.get(tier, 0)
        if len(slots) != len(blocks) or not slots:
            raise ValueError(f"plan with {len(slots)} slots for {len(blocks)} blocks")
        if min(slots) < 0 or max(slots) >= size or min(blocks) < 0 or max(blocks) >= self._num_blocks:
            raise ValueError(f"plan outside of the {size} slots of {tier.name} or the {self._num_blocks} blocks of the engine")
