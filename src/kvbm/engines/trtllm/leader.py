"""The leader's half: follows every request through the engine's scheduler and drives the leader.

Lives on rank 0. Every method is called from the engine's executor thread, and so is :meth:`LeaderHalf.tick`, by the
worker of rank 0, at the end of every iteration: an iteration without a batch does not call the scheduler at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import kvbm
from kvbm.config import Config
from kvbm.core.cost import RECOMPUTE, CostModel
from kvbm.core.keys import KeyChain, Namespace, Scope
from kvbm.core.manager import Match
from kvbm.engines.guard import Faults
from kvbm.engines.trtllm import compat
from kvbm.engines.trtllm.keys import scope_of
from kvbm.engines.trtllm.services import Services
from kvbm.engines.trtllm.step import StepMeta
from kvbm.observe.observer import Observer, settings_given
from kvbm.observe.requests import LOADED, ON_DEVICE, SKIPPED, TOO_SHORT, Admission, looked_up, passed_over
from kvbm.observe.snapshot import Identity
from kvbm.plans import LoadPlan, Recompute, Report, StepPlan, StorePlan
from kvbm.runtime.channel import Timing, ZmqLeader
from kvbm.runtime.leader import Counts, Leader
from kvbm.runtime.steps import StepTimes, Work
from kvbm.runtime.tiers import DiskTier, agreed_weights, make_manager, measured
from kvbm.tiers import registry

logger = logging.getLogger("kvbm")

# How long blocks that were offered are kept from being evicted until the engine has made room for them. It does so in
# the same iteration or a little later, or never, as when the request is cancelled in between, of which nobody hears.
# Then its tokens and keys go, too; should it come after all, it is computed.
OFFER_SECONDS = 30.0
FORGOTTEN = 65536  # requests of which no more is known than that they must be computed

# The engine's ranks run in lockstep, so one that starves holds up all the others and comes back with them, and one that
# dies takes the engine with it. Giving a rank up early gains nothing here.
TIMING = Timing(silence=300.0)

OUTSIDE = "outside of the step, as always here"

# Leaders of this process by address, for the worker of rank 0.
_local: dict[str, LeaderHalf] = {}


def find_local(url: str) -> LeaderHalf | None:
    return _local.get(url)


class _Request:
    """What we know of a request that the engine is working on."""

    __slots__ = (
        "blocks", "chain", "deadline_seconds", "found", "keep", "limit", "load", "match", "offered_at", "prompt",
        "scope", "seen", "start", "stored", "tokens",
    )  # fmt: skip

    def __init__(self, chain: KeyChain | None, tokens: list[int], scope: Scope | None) -> None:
        self.chain = chain  # None: its blocks have no keys
        self.scope = scope
        self.tokens = tokens
        self.prompt = len(tokens)
        self.blocks: list[int] = []
        self.keep = chain is not None
        self.stored = 0  # blocks from the front that need no more thought
        self.limit: int | None = None  # the first block that is not to be kept, because of its priority
        self.match: Match | None = None  # what was offered; held until the engine has made room
        self.start = 0  # its first block
        self.offered_at: float | None = None  # None: nothing is, or the engine has made room
        self.load: LoadPlan | None = None  # what is filling its blocks
        self.deadline_seconds = 0.0  # of a load from a staged tier
        self.found: int | None = None  # blocks it did not have to compute when it was first scheduled
        self.seen: Admission | None = None  # what was looked up for it


class _SetBack:
    """A request on its way back to a position from which all ranks can compute it."""

    __slots__ = ("order", "ranks")

    def __init__(self, order: Recompute, ranks: Iterable[int]) -> None:
        self.order = order
        self.ranks = set(ranks)  # which have not done it yet


class LeaderHalf:
    def __init__(self, config: Config, setup: compat.Setup, faults: Faults) -> None:
        self.leader: Leader | None = None  # until the workers have said how much room they have
        self.counts = Counts()
        self._config = config
        self._setup = setup
        self._faults = faults
        self._size = setup.tokens_per_block
        self._cost = CostModel(
            registry.priors(), setup.step_tokens or 8192, layers_from=inf, mode="async", load=config.load
        )
        self._steps = StepTimes(self._cost)
        self._step_planned = False  # in this iteration
        self.engine_blocks = 0  # the worker of this rank says
        self.observer = Observer(config, faults.counts)
        self._namespace: Namespace | None = None
        self._disk: DiskTier | None = None
        self._block_bytes = 0  # of the rank that has the most to move
        self._requests: dict[int, _Request] = {}
        self._offers: dict[int, _Request] = {}
        self._waiting: dict[int, float] = {}  # requests without blocks -> when the engine asked; oldest first
        self._forgotten: dict[int, int] = {}  # such that never got any -> the first block that was offered
        self._owners: dict[int, int] = {}  # stores that some rank has not confirmed -> their requests
        self._set_backs: dict[int, _SetBack] = {}
        self._loads: dict[int, set[int]] = {}  # under way -> positions that ranks have said did not arrive
        self._lost: set[int] = set()
        self._off = False
        self._messages = 0
        self._orders = 0
        self._services = Services(faults)
        timeout = config.leader_worker_init_timeout_secs
        self._channel = ZmqLeader(setup.ranks, config.leader_pub_url, config.leader_ack_url, timeout, TIMING)
        _local[config.leader_pub_url] = self

    # -- start --------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Block until every rank has its memory. Raises when they do not meet in time."""
        self._channel.wait()
        self.tick()

    def _begin(self) -> Leader:
        """Every rank has allocated what was agreed: the cache can serve."""
        agreement, setup = self._channel.wait(0), self._setup
        self._namespace = Namespace(
            model=setup.model,
            dtype=f"trtllm/{setup.cache['dtype']}",
            layout=agreement.layout,
            block_size=self._size,
            tensor_parallel=setup.ranks,
        )
        hellos = self._channel.hellos
        if self._config.has_disk_tier and (weights := agreed_weights(hellos)):
            self._disk = DiskTier.open(self._config, hellos, {**setup.cache, "weights": weights})
        pending, sizes = self._config.max_pending_offloads, agreement.block_bytes
        self._block_bytes = max(sizes)
        manager = make_manager(hellos, self._disk)
        leader = Leader(manager, setup.ranks, pending, sizes, self._cost, self.observer.log)
        if self._disk is not None:
            self._disk.serve(self._config, leader)
        for tier in manager.catalogs:
            if (rate := measured(hellos, tier)) is not None:
                self._cost.start_from(tier, rate)
        leader.on_ended_load = self._load_ended
        self.counts = leader.counts
        self._services.start(self._config, setup, manager.catalogs, lambda: self.leader)
        slots = {name: catalog.size for name, catalog in manager.catalogs.items()}
        logger.info(
            "KVBM is ready: %s of %d tokens (%.2f GB over %d rank%s)",
            " and ".join(f"{size} {name} blocks" for name, size in slots.items()), self._size,
            sum(slots.values()) * sum(sizes) / 1e9, setup.ranks, "" if setup.ranks == 1 else "s",
        )  # fmt: skip
        return leader

    def _show(self) -> None:
        """Let others see what is done here."""
        setup = self._setup
        identity = Identity(
            kvbm=kvbm.__version__,
            engine="tensorrt_llm",
            engine_version=compat.release(),
            model=setup.model,
            ranks=setup.ranks,
            block_tokens=self._size,
            block_bytes=sum(self._channel.wait(0).block_bytes),
            engine_blocks=self.engine_blocks,
            settings=settings_given(self._config),
        )
        self.observer.start(identity, lambda: self.leader, self._cost, who=f"engine at {self._config.leader_pub_url}")

    # -- every iteration ----------------------------------------------------------------------------------------------

    def end_iteration(self) -> None:
        """From the worker of this rank, at the end of every iteration."""
        self.tick()
        planned, self._step_planned = self._step_planned, False
        # With overlapping steps the engine has just looked at the results of the last one but one.
        under_way = 1 if planned and self._setup.overlap else 0
        while self._steps.under_way > under_way:
            self._steps.ended(time.monotonic())

    def tick(self) -> None:
        """Take in what the ranks have said. May be called at any time, from the engine's thread. Never raises."""
        if self._off:
            return
        try:
            with self._faults.engine_lock:
                self._tick()
        except Exception as error:
            # Books that are half written cannot be trusted, and must not wait for what was lost with the other half.
            self._faults.record("taking in reports", error)
            logger.error("KVBM is off from here on: its books are out of step. TensorRT-LLM goes on without it.")
            self._off, self.leader = True, None

    def _tick(self) -> None:
        if self.leader is None:
            if not self._channel.ready:
                return
            self.leader = self._begin()
            self._show()
        reports = self._channel.receive()
        if reports:
            self._apply(self.leader, reports)
        for rank in self._channel.lost_ranks():
            if rank not in self._lost:
                self._lose(self.leader, rank)
        if self._waiting:
            self._forget_old()
        # Not part of any step, and so over the channel: they go on while the engine has no batch.
        if moves := self.leader.plan_moves():
            self._send(StepPlan(moves=moves))
        self._services.tell()

    def _apply(self, leader: Leader, reports: list[Report]) -> None:
        for report in reports:
            for reason, times in report.faults.items():
                self._faults.note(f"rank {report.rank}: {reason}", times)
            for load in report.loads:
                if load.id in self._set_backs:
                    self._has_set_back(report.rank, load.id, ok=not load.bad)
                elif load.id in self._loads:
                    self._loads[load.id].update(load.bad, load.missed)
        leader.apply(reports)
        if self._owners:
            under_way = leader.stores_in_flight()
            self._owners = {store: self._owners[store] for store in under_way if store in self._owners}

    def _lose(self, leader: Leader, rank: int) -> None:
        """A rank is dead. Nothing is found or kept from here on; the others need not wait for it."""
        self._lost.add(rank)
        self._faults.note(f"rank {rank}: lost", 1)
        leader.fail_rank(rank)
        for order in list(self._set_backs):
            self._has_set_back(rank, order, ok=True)

    def _send(self, plan: StepPlan) -> None:
        self._messages += 1
        self._channel.send(plan)

    # -- finding ------------------------------------------------------------------------------------------------------

    def match(self, request: Any, computed: int) -> tuple[int, bool]:
        """(tokens that can be brought back beyond those the engine has, whether that happens outside of the step).

        Always outside: the engine can be kept from using blocks that did not arrive only as long as their request is
        not in a batch.
        """
        self.tick()
        if self.leader is None or self._namespace is None:
            return 0, False
        number, tokens, scope = compat.needed(request, "request_id"), compat.tokens_of(request), scope_of(request)
        state = _Request(None if scope is None else KeyChain(self._namespace, scope), tokens, scope)
        self._requests[number] = state
        self._forgotten.pop(number, None)
        self._waiting.pop(number, None)
        self._waiting[number] = time.monotonic()
        start = computed // self._size
        # One token at least is left to compute: the engine needs its logits.
        limit = (len(tokens) - 1) // self._size
        log, name = self.observer.log, str(number)
        whole = compat.needs_every_token(request)
        if state.chain is None or computed % self._size or limit <= start or self._lost or whole:
            outcome = SKIPPED if limit > start else ON_DEVICE if start else TOO_SHORT
            log.admitted(passed_over(name, len(tokens), computed, self._size, outcome))
            return 0, False
        # The engine asks once, so there is no waiting for what is just being written.
        keys = state.chain.extend(tokens)
        found = self.leader.manager.lookup(keys, start, limit, wait_for_writers=False)
        state.seen = looked_up(name, len(tokens), computed, limit, found, 0, self._size)
        if found.blocks:
            # Nobody may have heard of what an engine before this one has left.
            self._services.follow(keys, tokens, start, start + found.blocks, scope)
            found, state.deadline_seconds = self._worth_loading(found, computed, len(tokens) - computed)
            state.seen = state.seen._replace(why=OUTSIDE if found.blocks else RECOMPUTE)
        if not found.blocks:
            log.admitted(state.seen)
            return 0, False
        self.leader.manager.hold(found)
        state.match, state.start, state.offered_at = found, start, time.monotonic()
        self._offers[number] = state
        return found.blocks * self._size, True

    def _worth_loading(self, found: Match, computed: int, left: int) -> tuple[Match, float]:
        """(as much of a match as is expected to come back sooner than it is computed, seconds a disk may take)."""
        others = self._steps.under_way > 0
        decision = self._cost.decide(found, self._block_bytes, self._size, computed, left, others)
        if decision.blocks < found.blocks:
            self._cost.observe_refusal(found.beyond(decision.blocks))
            reason = RECOMPUTE if decision.blocks else decision.reason
            refused = self.counts.refused_load_blocks
            refused[reason] = refused.get(reason, 0) + found.blocks - decision.blocks
        # By then it would have been computed. Who forces a load waits for it as long as anything comes at all.
        seconds = max(decision.recompute_seconds, self._config.disk_load_timeout_secs)
        return found.cut(decision.blocks), seconds if self._config.load == "auto" else 0.0

    def _withdraw(self, number: int) -> Match | None:
        """Let what was offered to a request be evicted again."""
        state = self._offers.pop(number, None)
        if state is None or state.match is None or self.leader is None:
            return None
        match, state.match = state.match, None
        self.leader.manager.release(match)
        return match

    def _forget_old(self) -> None:
        before = time.monotonic() - OFFER_SECONDS
        while self._waiting and (oldest := next(iter(self._waiting.items())))[1] < before:
            number = oldest[0]
            self._withdraw(number)
            state = self._end(number)
            if state is not None and state.offered_at is not None:
                self._forgotten[number] = state.start
                if len(self._forgotten) > FORGOTTEN:
                    del self._forgotten[next(iter(self._forgotten))]

    def _end(self, number: int) -> _Request | None:
        """Nothing more is known of a request."""
        self._waiting.pop(number, None)
        state = self._requests.pop(number, None)
        if state is not None:
            keys = state.chain.keys if state.chain is not None else []
            self.observer.log.finished(str(number), len(state.tokens) - state.prompt, keys)
        return state

    def allocated(self, request: Any, blocks: Sequence[int]) -> None:
        """The engine has given the request its blocks; those of what was offered are now ours to fill."""
        number = compat.needed(request, "request_id")
        self._waiting.pop(number, None)
        state = self._requests.get(number)
        if state is None and number in self._forgotten:
            state = _Request(None, [], None)
            state.start, state.offered_at = self._forgotten.pop(number), 0.0
        if state is None or state.offered_at is None:
            return
        state.offered_at = None
        try:
            self._load(number, state, blocks)
        except Exception as error:
            # The engine counts on these blocks already.
            self._faults.record("planning a load", error)
            self._set_back(number, state, state.start)

    def _load(self, number: int, state: _Request, blocks: Sequence[int]) -> None:
        match = self._withdraw(number)
        if match is None or self.leader is None:
            raise RuntimeError(f"the engine has taken more than {OFFER_SECONDS:.0f} s to make room for a request")
        # With its second cache manager the engine may make room for the front only, and computes the rest.
        match = match.cut(len(blocks) - match.start)
        if not match.blocks:
            raise RuntimeError("the engine has made no room for what was offered")
        end = match.start + match.blocks
        targets = list(blocks[match.start : end])
        plan = self.leader.onboard(match, str(number), targets, in_step=False, deadline_seconds=state.deadline_seconds)
        state.load, state.stored = plan, end
        self._loads[plan.id] = set()
        self._send(StepPlan(loads=[plan]))
        if state.seen is not None:
            spared = self._cost.prefill_seconds(match.start * self._size, match.blocks * self._size)
            seen = state.seen._replace(loaded=match.blocks, outcome=LOADED, compute_seconds=spared)
            self.observer.log.admitted(seen, plan.id)
        counts = self.leader.counts
        counts.matched_tokens += match.blocks * self._size
        for copy in plan.copies:
            counts.matched_blocks[copy.tier] = counts.matched_blocks.get(copy.tier, 0) + len(copy.slots)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _load_ended(self, plan: LoadPlan, bad: set[int]) -> None:
        """Every rank is through with a load, or is dead."""
        number = int(plan.request)
        state = self._requests.get(number)
        # What only a dead rank has lost holds nobody up.
        missing = self._loads.pop(plan.id, None)
        if state is None or state.load is not plan:
            return  # the request is gone
        state.load = None
        if missing:
            self._set_back(number, state, state.stored - len(plan.blocks) + min(missing))

    def _set_back(self, number: int, state: _Request, block: int) -> None:
        """Every rank is to compute the request from this block on."""
        self._orders -= 1
        order = Recompute(self._orders, str(number), block * self._size)
        state.stored = min(state.stored, block)
        self._set_backs[order.id] = _SetBack(order, set(range(self._setup.ranks)) - self._lost)
        self._send(StepPlan(recompute=[order]))

    def _has_set_back(self, rank: int, number: int, ok: bool) -> None:
        back = self._set_backs[number]
        if not ok:
            del self._set_backs[number]
            logger.error(
                "request %s can neither be loaded nor be computed: TensorRT-LLM %s keeps it where KVBM does not find "
                "it. It waits until it is cancelled.", back.order.request, compat.release(),
            )  # fmt: skip
            return
        back.ranks.discard(rank)
        if not back.ranks:
            del self._set_backs[number]
            self._send(StepPlan(recompute=[_agreed(back.order)]))

    # -- keeping ------------------------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepMeta:
        self.tick()
        leader = self.leader
        if leader is None:
            return StepMeta()
        stores: list[StorePlan] = []
        owners: dict[int, int] = {}
        steps: list[compat.Step] = []
        try:
            new = [compat.read_step(data) for data in compat.needed(output, "new_requests")]
            old = [compat.read_step(data) for data in compat.needed(output, "cached_requests")]
            steps = new + old
            fences = leader.fences(self._follow(new, old))
        except Exception as error:
            # Without the tables we can tell neither which copies are in danger nor whose a block is: the step waits for
            # all copies, and nothing more is kept of the requests there are.
            self._faults.record("following block tables", error)
            for state in self._requests.values():
                state.keep = False
            fences = leader.stores_in_flight()
        for step in steps:
            try:
                plan = self._plan_store(leader, step)
            except Exception as error:
                self._faults.record("planning a store", error)
                continue
            if plan is not None:
                stores.append(plan)
                owners[plan.id] = step.request
        self._owners.update(owners)
        self._time(steps)
        return StepMeta(StepPlan(stores=stores, fences=fences), self._messages, owners)

    def _time(self, steps: Sequence[compat.Step]) -> None:
        """A request with more tokens than one is computing its prompt, or guesses; few of the latter change little."""
        prompts = [step for step in steps if step.scheduled > 1]
        tokens = sum(step.scheduled for step in prompts)
        before = sum(step.scheduled * step.computed for step in prompts) // tokens if tokens else 0
        self._steps.scheduled(Work(tokens, before, decodes=bool(steps) and not tokens, waits=False), time.monotonic())
        self._step_planned = True

    def _follow(self, new: Sequence[compat.Step], old: Sequence[compat.Step]) -> list[int]:
        """Bring tokens and block tables up to date. Returns the blocks that this step may be the first to write to."""
        fresh: list[int] = []
        for step in new:
            fresh += step.blocks[step.computed // self._size :]
            state = self._requests.get(step.request)
            self._waiting.pop(step.request, None)
            if state is not None:
                # All of it, the prompt's tokens too, whatever was known before.
                state.tokens, state.blocks, state.limit = list(step.tokens), [], None
                if state.found is None:
                    state.found = step.computed // self._size
                self._extend_table(state, step)
        for step in old:
            fresh += step.blocks
            self._waiting.pop(step.request, None)
            state = self._requests.get(step.request)
            if state is not None:
                state.tokens += step.tokens
                self._extend_table(state, step)
        return fresh

    def _extend_table(self, state: _Request, step: compat.Step) -> None:
        minimum = self._config.host_offload_prefix_min_priority
        if state.limit is None and minimum:
            priorities = step.priorities or [compat.DEFAULT_PRIORITY] * len(step.blocks)
            low = next((i for i, priority in enumerate(priorities) if priority < minimum), None)
            state.limit = None if low is None else len(state.blocks) + low
        state.blocks += step.blocks

    def _plan_store(self, leader: Leader, step: compat.Step) -> StorePlan | None:
        """A plan for the blocks that this step completes."""
        state = self._requests.get(step.request)
        if state is None or state.chain is None or not state.keep:
            return None
        size = self._size
        # A request that was set back computes, and stores, the blocks behind once more.
        state.stored = min(state.stored, step.computed // size)
        # What the step computes beyond the tokens that are known (drafts, and with overlapping steps the token of the
        # step before) has no key yet, and waits for a later step.
        full = min((step.computed + step.scheduled) // size, len(state.tokens) // size, len(state.blocks))
        if not self._config.offload_decode:
            full = min(full, state.prompt // size)
        if state.limit is not None:
            full = min(full, state.limit)
        if full <= state.stored:
            return None
        blocks = state.blocks[state.stored : full]
        if min(blocks) < 0:
            state.keep = False  # a block without a page: a sliding window has passed over it
            return None
        keys = state.chain.extend(state.tokens)
        pool = leader.manager.near
        if pool.free < len(blocks):
            # Something must go for these blocks, and not the blocks in front of them.
            pool.touch(keys[: state.stored])
        plan = leader.offload(keys[state.stored : full], blocks)
        self._services.follow(keys, state.tokens, state.stored, full, state.scope)
        state.stored = full
        return plan

    # -- ends ---------------------------------------------------------------------------------------------------------

    def finished(self, request: Any) -> bool:
        """True when the engine must keep the request's blocks until the workers say that they are through with them.

        So it is while a load still writes to them. Stores read them under the protection of fences; but where the
        engine copies parts of blocks on its own, before we hear of their new owner, it has to wait for those as well.
        """
        self.tick()
        number = compat.needed(request, "request_id")
        self._withdraw(number)
        self._forgotten.pop(number, None)
        state = self._end(number)
        for order, back in list(self._set_backs.items()):
            if back.order.request == str(number):
                del self._set_backs[order]
                self._send(StepPlan(recompute=[_agreed(back.order)]))  # nobody computes it; nobody need wait any more
        if state is None:
            return False
        if state.chain is not None and state.stored and self.leader is not None:
            # What the request has used is recent now, wherever it was found; its last blocks are the first to go.
            self.leader.touch(state.chain.keys[: state.stored])
            if state.found:
                self.leader.used(state.chain.keys[: state.found])
        return state.load is not None or (self._setup.partial_reuse and number in self._owners.values())

    def close(self) -> None:
        _local.pop(self._config.leader_pub_url, None)
        self.observer.close()
        self._services.close()
        self._channel.close()
        if self._disk is not None:
            self._disk.index.close()


def _agreed(order: Recompute) -> Recompute:
    return Recompute(order.id, order.request, order.position, agreed=True)
