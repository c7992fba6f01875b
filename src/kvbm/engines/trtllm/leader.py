"""The leader's adapter: follows every request through the engine's scheduler and drives the leader.

Lives on rank 0. Every method is called from the engine's executor thread, and so is :meth:`LeaderAdapter.tick`, by the
worker of rank 0, at the end of every iteration: an iteration without a batch does not call the scheduler at all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from kvbm.config import Config
from kvbm.core.keys import KeyChain, Namespace, Scope
from kvbm.engines.guard import Faults
from kvbm.engines.hints import from_priorities, from_retention
from kvbm.engines.request import Completed, RequestState
from kvbm.engines.session import Session
from kvbm.engines.trtllm import compat
from kvbm.engines.trtllm.keys import scope_of
from kvbm.engines.trtllm.services import Services
from kvbm.engines.trtllm.step import StepMeta
from kvbm.plans import LoadPlan, Recompute, Report, StepPlan, StorePlan
from kvbm.runtime.channel import Timing, ZmqLeader
from kvbm.runtime.leader import Leader
from kvbm.runtime.steps import Work
from kvbm.tiers import registry
from kvbm.tiers.secret import read_secret

logger = logging.getLogger("kvbm")

# How long the leader protects offered blocks from eviction until the engine allocates room for them. The engine does so
# in the same iteration or a little later. The engine does not report a request that is cancelled in between. After
# this time the leader also drops the request's tokens and keys; if the engine still schedules it, it is computed.
OFFER_SECONDS = 30.0
FORGOTTEN = 65536  # requests whose offer has expired: they must be computed

# The engine's ranks run in lockstep, so one that starves holds up all the others and comes back with them, and one that
# dies takes the engine with it. Giving a rank up early gains nothing here.
TIMING = Timing(silence=300.0)

# Leaders of this process by address, for the worker of rank 0.
_local: dict[str, LeaderAdapter] = {}


def find_local(url: str) -> LeaderAdapter | None:
    return _local.get(url)


class _Request(RequestState):
    """The leader's state of a request that the engine has not finished."""

    __slots__ = (
        "blocks", "chain", "is_cancelled", "limit", "load", "offered", "prompt", "scope", "start", "tokens",
    )  # fmt: skip

    def __init__(self, number: int, chain: KeyChain | None, tokens: list[int], scope: Scope | None) -> None:
        super().__init__(str(number))
        self.chain = chain  # None: its blocks have no keys
        self.scope = scope
        self.tokens = tokens
        self.prompt = len(tokens)
        self.blocks: list[int] = []
        self.keep = chain is not None
        self.limit: int | None = None  # the first block that is not to be kept, because of its priority
        self.start = 0  # the first block that was offered
        self.offered = False  # and the engine has not made room yet
        self.is_cancelled = False  # the offer, by the engine
        self.load: LoadPlan | None = None  # the load that fills its blocks


class LeaderAdapter:
    def __init__(self, config: Config, setup: compat.Setup, faults: Faults) -> None:
        self._config = config
        self._setup = setup
        self._faults = faults
        self._size = setup.tokens_per_block
        self.session = Session(
            "TensorRT-LLM", config, faults, self._size, setup.step_tokens or 8192, setup.hidden_size, outside_only=True
        )
        self.observer = self.session.observer
        self._cost = self.session.cost
        self._steps = self.session.steps
        self._step_planned = False  # in this iteration
        self.engine_blocks = 0  # the worker of this rank says
        self._namespace: Namespace | None = None
        self._requests: dict[int, _Request] = {}
        self._waiting: dict[int, float] = {}  # requests without blocks -> when the engine asked; oldest first
        self._forgotten: dict[int, int] = {}  # such that never got any -> the first block that was offered
        self._owners: dict[int, int] = {}  # stores that some rank has not confirmed -> their requests
        self._set_backs: dict[int, tuple[Recompute, set[int]]] = {}  # and the ranks that have not done it yet
        self._loads: dict[int, set[int]] = {}  # under way -> positions that ranks have said did not arrive
        self._lost: set[int] = set()
        self._off = False
        self._messages = 0
        self._orders = 0
        self._services = Services("TensorRT-LLM", faults)
        timeout = config.leader_worker_init_timeout_secs
        urls = config.leader_pub_url, config.leader_ack_url
        self._channel = ZmqLeader(setup.ranks, *urls, timeout, TIMING, read_secret(config))
        _local[config.leader_pub_url] = self

    @property
    def leader(self) -> Leader | None:
        return self.session.leader

    # -- start --------------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Block until every rank has its memory. Raises when they do not meet in time."""
        self._channel.wait()
        self.tick()

    def _begin(self) -> None:
        """Every rank has allocated the agreed memory: the cache can serve."""
        agreement, setup, config = self._channel.wait(0), self._setup, self._config
        self._namespace = Namespace(
            model=setup.model,
            dtype=f"trtllm/{setup.cache['dtype']}",
            layout=agreement.layout,
            block_size=self._size,
            tensor_parallel=setup.ranks,
        )
        leader = self.session.begin(self._channel.hellos, setup.cache if registry.outlives_engine(config) else None)
        leader.on_ended_load = self._load_ended
        self._services.start(config, setup, self.session, self.engine_blocks)

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
        """Take in the ranks' reports. May be called at any time, from the engine's thread. Never raises."""
        if self._off:
            return
        try:
            with self._faults.engine_lock:
                self._tick()
        except Exception as error:
            self.session.switch_off(error)
            self._off = True

    def _tick(self) -> None:
        if self.leader is None:
            if not self._channel.ready:
                return
            self._begin()
        leader = self.leader
        assert leader is not None
        reports = self._channel.receive()
        if reports:
            self._apply(leader, reports)
        for rank in self._channel.lost_ranks():
            if rank not in self._lost:
                self._lose(leader, rank)
        if self._waiting:
            self._forget_old()
        # Not part of any step, and so over the channel: they go on while the engine has no batch.
        if moves := leader.plan_moves():
            self._send(StepPlan(moves=moves))
        self._services.tell()

    def _apply(self, leader: Leader, reports: list[Report]) -> None:
        self.session.note_faults(reports)
        for report in reports:
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
        state = _Request(number, None if scope is None else KeyChain(self._namespace, scope), tokens, scope)
        state.tenant = self.session.tenant_of(getattr(request, "cache_salt", None))
        retention = from_retention(getattr(request, "kv_cache_retention_config", None), self._size)
        state.turn = state.turn._replace(retention=retention)
        if (before := self._requests.get(number)) is not None:
            self.session.withdraw(before)
        self._requests[number] = state
        self._forgotten.pop(number, None)
        self._waiting.pop(number, None)
        self._waiting[number] = time.monotonic()
        if self._look_up(self.leader, state, request, computed):
            assert state.match is not None
            return state.match.blocks * self._size, True
        self.session.admit(state)
        return 0, False

    def _look_up(self, leader: Leader, state: _Request, request: Any, computed: int) -> bool:
        """Whether something is offered."""
        tokens = len(state.tokens)
        if state.chain is None or self._lost or compat.needs_every_token(request):
            self.session.skip(state, tokens, computed)
            return False
        wanted = self.session.wanted(state, tokens, computed)
        if wanted is None:
            return False
        start, limit = wanted
        # The engine asks once, so the lookup does not wait for blocks that are being written.
        keys = state.chain.extend(state.tokens)
        found = leader.manager.lookup(keys, start, limit, wait_for_writers=False)
        if found.blocks:
            # Subscribers may not know the blocks that an engine before this one has left.
            self._services.follow(keys, state.tokens, start, start + found.blocks, state.scope)
        decision = self.session.decide(found, tokens, others=self._steps.under_way > 0)
        if not self.session.consider(state, found, decision, tokens, limit):
            return False
        self.session.offer(state, found, decision, in_step=False, hold=True)
        state.start, state.offered = start, True
        return True

    def _forget_old(self) -> None:
        before = time.monotonic() - OFFER_SECONDS
        while self._waiting and (oldest := next(iter(self._waiting.items())))[1] < before:
            number = oldest[0]
            state = self._end(number)
            if state is not None and state.offered:
                self._forgotten[number] = state.start
                if len(self._forgotten) > FORGOTTEN:
                    del self._forgotten[next(iter(self._forgotten))]

    def _end(self, number: int) -> _Request | None:
        """Nothing more is known of a request."""
        self._waiting.pop(number, None)
        state = self._requests.pop(number, None)
        if state is not None:
            keys = state.chain.keys if state.chain is not None else []
            self.session.finish(state, len(state.tokens) - state.prompt, keys)
        return state

    def allocated(self, request: Any, blocks: Sequence[int]) -> None:
        """The engine has allocated the request's blocks: load the offered ones."""
        number = compat.needed(request, "request_id")
        self._waiting.pop(number, None)
        state = self._requests.get(number)
        if state is None and number in self._forgotten:
            state = _Request(number, None, [], None)
            state.start, state.offered = self._forgotten.pop(number), True
        if state is None or not state.offered:
            return
        state.offered = False
        try:
            self._load(number, state, blocks)
        except Exception as error:
            # The engine counts on these blocks already.
            self._faults.record("planning a load", error)
            self.session.withdraw(state)
            self._set_back(number, state, state.start)

    def cancelled(self, request: Any, start: int) -> None:
        """The engine takes no block from this token on. It may park the request for the load all the same, and then
        says which blocks it has made room for: :meth:`allocated`."""
        state = self._requests.get(compat.needed(request, "request_id"))
        if state is not None and state.offered and start <= state.start * self._size:
            self.session.withdraw(state)
            state.is_cancelled = True

    def _load(self, number: int, state: _Request, blocks: Sequence[int]) -> None:
        match = state.match
        if state.is_cancelled:
            self._set_back(number, state, state.start)
            return
        if match is None or self.leader is None:
            raise RuntimeError(f"the engine has taken more than {OFFER_SECONDS:.0f} s to make room for a request")
        # With its second cache manager the engine may make room for the front only, and computes the rest.
        match = match.cut(len(blocks) - match.start)
        if not match.blocks:
            raise RuntimeError("the engine has made no room for what was offered")
        end = match.start + match.blocks
        plan = self.session.load(state, match, list(blocks[match.start : end]), match.blocks)
        state.load, state.stored = plan, end
        self._loads[plan.id] = set()
        self._send(StepPlan(loads=[plan]))
        self.session.admit(state, plan, match.blocks)

    # -- failures -----------------------------------------------------------------------------------------------------

    def _load_ended(self, plan: LoadPlan, bad: set[int]) -> None:
        """Every rank is through with a load, or is dead."""
        number = int(plan.request)
        state = self._requests.get(number)
        # Blocks that only a dead rank has lost do not set the request back.
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
        self._set_backs[order.id] = (order, set(range(self._setup.ranks)) - self._lost)
        self._send(StepPlan(recompute=[order]))

    def _has_set_back(self, rank: int, number: int, ok: bool) -> None:
        order, ranks = self._set_backs[number]
        if not ok:
            del self._set_backs[number]
            logger.error(
                "request %s can neither be loaded nor be computed: TensorRT-LLM %s keeps it where KVBM does not find "
                "it. It waits until it is cancelled.", order.request, compat.release(),
            )  # fmt: skip
            return
        ranks.discard(rank)
        if not ranks:
            del self._set_backs[number]
            self._send(StepPlan(recompute=[replace(order, agreed=True)]))

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
            # Without the block tables the leader does not know which request owns a block, nor which copies the step
            # would overwrite: the step waits for all copies, and the present requests store nothing more.
            self._faults.record("following block tables", error)
            for state in self._requests.values():
                state.keep = False
            fences = leader.stores_in_flight()
        for step in steps:
            try:
                plan = self._plan_store(step)
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
        """A request with more than one token computes its prompt or verifies drafts; few drafts change little."""
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
                # A new request carries all of its tokens, the prompt's too: replace what earlier outputs gave.
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
        if step.priorities and not state.turn.retention:  # releases do not pass on the ranges, or not yet
            state.turn = state.turn._replace(retention=from_priorities(len(state.blocks), step.priorities))
        state.blocks += step.blocks

    def _plan_store(self, step: compat.Step) -> StorePlan | None:
        """A plan for the blocks that this step completes."""
        state = self._requests.get(step.request)
        if state is None or state.chain is None or not state.keep:
            return None
        end = self.session.completed(state, step.computed, step.scheduled, state.prompt)
        # Tokens that the leader does not know yet (drafts, and with overlapping steps the token of the step before)
        # have no key: a later step stores their blocks.
        end = min(end, len(state.tokens) // self._size, len(state.blocks))
        if state.limit is not None:
            end = min(end, state.limit)
        if end <= state.stored:
            return None
        first, blocks = state.stored, state.blocks[state.stored : end]
        if min(blocks) < 0:
            state.keep = False  # a block without a page: a sliding window has passed over it
            return None
        keys = state.chain.extend(state.tokens)
        plan = self.session.store([Completed(state, keys, first, end, step.computed)], keys[first:end], blocks)
        self._services.follow(keys, state.tokens, first, end, state.scope)
        return plan

    # -- ends ---------------------------------------------------------------------------------------------------------

    def finished(self, request: Any) -> bool:
        """True when the engine must keep the request's blocks until the workers say that they are through with them.

        That is the case while a load still writes to them. Fences protect stores that read them. But if the engine
        reuses parts of blocks, it copies them before the leader learns of their new owner, so it waits for stores too.
        """
        self.tick()
        number = compat.needed(request, "request_id")
        self._forgotten.pop(number, None)
        state = self._end(number)
        for order, _ in list(self._set_backs.values()):
            if order.request == str(number):
                del self._set_backs[order.id]
                self._send(StepPlan(recompute=[replace(order, agreed=True)]))  # it has ended: ranks stop waiting
        if state is None:
            return False
        return state.load is not None or (self._setup.partial_reuse and number in self._owners.values())

    def close(self) -> None:
        _local.pop(self._config.leader_pub_url, None)
        try:
            self._services.close()
            self._channel.close()
        finally:
            self.session.close()
