"""A simulated engine: drives the request lifecycle as an engine's adapter does, and answers the leader's plans.

Requests of a plain trace are served one after the other, each in no time at its own timestamp: lookup, load, compute,
store, end. Transfers end before the next request comes. So queueing in the engine, and a disk that cannot keep up, are
not simulated; the bytes that each tier moves are counted, for a comparison with what the hardware can move.

The operations of a record are replayed in the order in which the engine made them, with the speeds that it had
measured. Transfers end at once as well, unless the replay is *exact*: then each ends at its place in the order, and
with the sizes of the record every lookup finds the blocks that it found in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

from kvbm.config import Config
from kvbm.core.clock import OperationClock
from kvbm.core.cost import PRIOR_STEP_SECONDS, Prices, Terms, TierPrices
from kvbm.core.keys import Key
from kvbm.core.manager import BlockManager
from kvbm.core.match import Match
from kvbm.core.pool import Pool
from kvbm.core.rate import Rate
from kvbm.engines.guard import Faults
from kvbm.engines.session import Completed, RequestState, Session
from kvbm.observe.record import LookupLine, StoreLine, seconds
from kvbm.plans import (
    DEVICE,
    Hello,
    LoadPlan,
    LoadResult,
    MovePlan,
    MoveResult,
    Report,
    StorePlan,
    StoreResult,
    TierHello,
    TierName,
)
from kvbm.simulate import hints
from kvbm.simulate.results import TierCounts, Totals
from kvbm.simulate.trace import Request, Trace, Transfer
from kvbm.tiers import registry


class Machine(NamedTuple):
    """Sizes and speeds that a trace does not tell."""

    block_bytes: int
    prefill_tokens_per_second: float
    rates: Mapping[TierName, Rate]  # of tiers that differ from their declarations
    terms: Terms
    device_blocks: int = 0  # of the engine's own prefix cache, for traces that do not tell what it had


class _Running(NamedTuple):
    request: Request
    state: RequestState


class SimulatedEngine:
    """``sizes``: slots of each tier, the near one first."""

    def __init__(self, trace: Trace, config: Config, sizes: Mapping[TierName, int], machine: Machine) -> None:
        self._trace = trace
        self._machine = machine
        self._now = 0.0
        config = config.with_policy("session")  # as an engine that tells whole requests
        rates = {name: machine.rates.get(name, registry.TIERS[name].prior) for name in sizes}
        self._rates = rates
        clock = OperationClock(lambda: self._now)
        catalogs = {name: registry.TIERS[name].make_pool(config, slots, clock) for name, slots in sizes.items()}
        terms = machine.terms
        self.session = Session(
            "simulator", config, Faults(), trace.block_tokens, terms.step_tokens,
            hidden_size=None if terms.attention_span is None else round(terms.attention_span / 4),
            layers_from=inf if terms.layers_from is None else terms.layers_from,
        )  # fmt: skip
        tiers = [
            TierHello(name, slots, (rates[name].bytes_per_second, rates[name].fixed_seconds))
            for name, slots in sizes.items()
        ]
        hello = Hello(0, machine.block_bytes, "", tiers)
        self._leader = self.session.begin([hello], None, BlockManager(catalogs, clock=clock))
        prices = {name: TierPrices(1 / rate.bytes_per_second, rate.fixed_seconds) for name, rate in rates.items()}
        token = 1 / machine.prefill_tokens_per_second
        self.session.cost.assume(Prices(PRIOR_STEP_SECONDS, token, prices))
        self._device = Pool(machine.device_blocks) if machine.device_blocks else None
        self._engine_blocks = 0  # handed out so far: each is used once, so no copy waits for another
        self._loads: dict[int, LoadPlan] = {}
        self._stores: dict[int, StorePlan] = {}
        self._moves: dict[int, MovePlan] = {}
        self.totals = Totals(tiers={name: TierCounts() for name in (DEVICE, *sizes)})
        self.found: list[dict[TierName, int]] = []  # by each lookup, in blocks
        self.loaded: list[int] = []
        self._finished = 0  # requests
        self._progress: Callable[[int], None] | None = None

    def _start(self, name: str, request: Request) -> _Running:
        state = RequestState(name)
        state.turn, state.tenant = hints.turn_of(request), self.session.tenant_of(request.tenant)
        return _Running(request, state)

    # -- the whole trace ----------------------------------------------------------------------------------------------

    def run(self, progress: Callable[[int], None] | None = None, exact: bool = False) -> Totals:
        """Replay every request. ``progress``: is told how many requests have ended, now and then."""
        self._progress = progress
        if self._trace.is_exact:
            self._run_record(exact)
        else:
            for number, request in enumerate(self._trace.requests, 1):
                self._serve(str(number), request)
        counts = self._leader.counts
        size = self._machine.block_bytes
        for name, tier in self.totals.tiers.items():
            tier.read_bytes = counts.onboarded_blocks.get(name, 0) * size
            tier.written_bytes = counts.moved_blocks.get(name, 0) * size
        near = self.totals.tiers[self._leader.manager.near_tier]
        near.written_bytes += (counts.offloaded_blocks + counts.promoted_blocks) * size
        for name, catalog in self._leader.manager.catalogs.items():
            self.totals.tiers[name].evicted_blocks = catalog.evictions
        self.session.close()
        return self.totals

    def _serve(self, name: str, request: Request) -> None:
        self._now = request.at
        running = self._start(name, request)
        computed = self._found_on_device(request) * self._trace.block_tokens
        self._arrive(running, request.tokens, computed, 0, False)
        self._settle()
        if request.keys:
            self._complete([(running, 0, len(request.keys))])
        self._settle()
        self._finish(running)
        self._settle()

    def _found_on_device(self, request: Request) -> int:
        """Blocks that the engine's own prefix cache has, which then has all of the request's."""
        device, keys = self._device, request.keys
        if device is None:
            return 0
        found = len(device.match(keys[: (request.tokens - 1) // self._trace.block_tokens]))
        device.touch(keys)
        fresh = [key for key in dict.fromkeys(keys) if key not in device][: device.size]
        device.commit(device.reserve(fresh) or [])
        return found

    # -- a record -----------------------------------------------------------------------------------------------------

    def _run_record(self, exact: bool) -> None:
        """Replay operations in their order. ``exact``: the ends of transfers too."""
        operations: dict[int, Callable[[], None]] = {}  # by their places in the order
        stores: dict[int, list[tuple[_Running, StoreLine]]] = {}  # one plan may have those of several requests
        plans: dict[int, int] = {}  # plan of the record -> that of the replay
        for number, request in enumerate(self._trace.requests):
            running = self._start(str(number), request)
            operations.update((line.order, partial(self._look_up, running, line)) for line in request.lookups)
            for line in request.stores:
                stores.setdefault(line.order, []).append((running, line))
            operations[request.ended] = partial(self._end, running)
        for order, parts in stores.items():
            parts.sort(key=lambda part: part[1].place)
            operations[order] = partial(self._store, parts, plans)
        for transfer in self._trace.transfers:
            if exact or transfer.kind == "reset":
                operations[transfer.order] = partial(self._end_transfer, transfer, plans)
        for order in sorted(operations):
            operations[order]()
            if not exact:
                self._settle()

    def _look_up(self, running: _Running, line: LookupLine) -> None:
        self._now = seconds(line.at)
        if line.prices is not None:
            self.session.cost.assume(line.prices)
        self._arrive(running, line.prompt_tokens, line.device_tokens, line.limit, line.others_running)

    def _store(self, parts: Sequence[tuple[_Running, StoreLine]], plans: dict[int, int]) -> None:
        line = parts[0][1]
        self._now = seconds(line.at)
        plan = self._complete([(running, part.first, part.end) for running, part in parts])
        if plan is not None:
            plans[line.plan] = plan.id

    def _end(self, running: _Running) -> None:
        self._now = running.request.ended_at
        self._finish(running)

    def _end_transfer(self, transfer: Transfer, plans: Mapping[int, int]) -> None:
        """Of plans, the record names its own. Loads and moves are numbered as they are in the replay, as long as it
        does the same; a store is told by its request."""
        self._now = transfer.at
        match transfer.kind:
            case "load":
                plan = self._loads.pop(transfer.plan, None)
                if plan is not None:
                    self._leader.apply([Report(0, loads=[LoadResult(plan.id, list(transfer.lost))])])
            case "store":
                store = self._stores.pop(plans.get(transfer.plan, 0), None)
                if store is not None:
                    self._leader.apply([Report(0, stores=[StoreResult(store.id, transfer.ok)])])
            case "move":
                move = self._moves.pop(transfer.plan, None)
                if move is not None:
                    self._leader.apply([Report(0, moves=[MoveResult(move.id)])])
            case "moves":
                self._plan_moves()
            case "reset":
                self.session.reset(())

    # -- a request ----------------------------------------------------------------------------------------------------

    def _arrive(self, running: _Running, tokens: int, computed: int, limit: int, others: bool) -> None:
        """The engine asks for a prompt of which it has ``computed`` tokens, and admits it. ``limit``: the record's."""
        request, state = running
        session, manager, totals = self.session, self._leader.manager, self.totals
        block_tokens = self._trace.block_tokens
        totals.lookups += 1
        totals.blocks += self._trace.blocks_of(tokens)
        totals.tokens += tokens
        device = totals.tiers[DEVICE]
        device.prefix_blocks += computed // block_tokens
        device.blocks += computed // block_tokens
        device.tokens += computed // block_tokens * block_tokens
        plan = None
        loaded = 0
        found: dict[TierName, int] = {}
        wanted = session.wanted(state, tokens, computed)
        if wanted is None or (request.lookups and not limit):
            seconds = recompute = session.cost.compute_seconds(computed, tokens - computed)
        else:
            start, end = wanted[0], limit or wanted[1]
            match = manager.lookup(request.keys, start, end)
            if match.pending:
                match = manager.lookup(request.keys, start, end, wait_for_writers=False)
            found = self._count(match, request.keys[start:end])
            decision = session.decide(match, tokens, others)
            if session.consider(state, match, decision, tokens, end):
                loaded = decision.blocks
                session.offer(state, match, decision, decision.in_step)
                assert state.match is not None
                plan = session.load(state, state.match, self._allocate(loaded), loaded)
                self._loads[plan.id] = plan
            seconds, recompute = decision.seconds, decision.recompute_seconds
        own = totals.tenants.setdefault(request.tenant, [0, 0])
        own[0] += self._trace.blocks_of(tokens)
        own[1] += computed // block_tokens + sum(found.values())
        self.found.append(found)
        self.loaded.append(loaded)
        totals.ttft_seconds.append(seconds)
        totals.recompute_seconds.append(recompute)
        totals.loaded_tokens += loaded * block_tokens
        session.admit(state, plan, loaded)
        if state.found is None:
            state.found = computed // block_tokens + loaded

    def _count(self, match: Match, keys: Sequence[Key]) -> dict[TierName, int]:
        """Blocks of a match by tier; and blocks that lie in a tier, with those behind a gap, which are of no use."""
        found: dict[TierName, int] = {}
        for tier, slots, _ in match.runs:
            found[tier] = found.get(tier, 0) + len(slots)
        tiers = self.totals.tiers
        for tier, blocks in found.items():
            tiers[tier].prefix_blocks += blocks
            tiers[tier].blocks += blocks
            tiers[tier].tokens += blocks * self._trace.block_tokens
        rest = keys[match.blocks :]
        for tier, catalog in self._leader.manager.catalogs.items():
            there = sum(map(catalog.__contains__, rest))
            if there:
                tiers[tier].blocks += there
                rest = [key for key in rest if key not in catalog]
        return found

    def _complete(self, grown: Sequence[tuple[_Running, int, int]]) -> StorePlan | None:
        """A step completes blocks (request, first, end)."""
        parts = [
            Completed(state, request.keys, first, end, first * self._trace.block_tokens)
            for (request, state), first, end in grown
        ]
        keys = [key for part in parts for key in part.keys[part.first : part.end]]
        plan = self.session.store(parts, keys, self._allocate(len(keys)))
        if plan is not None:
            self._stores[plan.id] = plan
        return plan

    def _finish(self, running: _Running) -> None:
        self.session.finish(running.state, running.request.output_tokens, running.request.keys)
        self._finished += 1
        if self._progress is not None and not self._finished % 256:
            self._progress(self._finished)

    def _allocate(self, blocks: int) -> range:
        first, self._engine_blocks = self._engine_blocks, self._engine_blocks + blocks
        return range(first, self._engine_blocks)

    # -- transfers ----------------------------------------------------------------------------------------------------

    def _plan_moves(self) -> None:
        for plan in self._leader.plan_moves():
            self._moves[plan.id] = plan

    def _settle(self) -> None:
        """Every transfer under way ends, and so do those that follow from it."""
        if self._leader.edges:
            self._plan_moves()
        while self._loads or self._stores or self._moves:
            loads, self._loads = self._loads, {}
            stores, self._stores = self._stores, {}
            moves, self._moves = self._moves, {}
            report = Report(
                0,
                loads=[self._loaded(plan) for plan in loads.values()],
                stores=[StoreResult(plan, True) for plan in stores],
                moves=[MoveResult(plan) for plan in moves],
            )
            self._leader.apply([report])
            if self._leader.edges:
                self._plan_moves()

    def _loaded(self, plan: LoadPlan) -> LoadResult:
        blocks: dict[TierName, int] = {}
        for copy in plan.copies:
            blocks[copy.tier] = blocks.get(copy.tier, 0) + len(copy.slots)
        took = {}
        for tier, count in blocks.items():
            rate = self._rates[tier]
            took[tier] = rate.fixed_seconds + count * self._machine.block_bytes / rate.bytes_per_second
        return LoadResult(plan.id, seconds=sum(took.values()), tier_seconds=took)
