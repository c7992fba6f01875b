"""The scheduler's adapter: follows every request through vLLM's scheduler and drives the leader."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from kvbm import gil
from kvbm.config import Config
from kvbm.core.cost import Decision
from kvbm.core.keys import Key
from kvbm.core.match import Match
from kvbm.engines.guard import Faults
from kvbm.engines.hints import from_params
from kvbm.engines.session import Session
from kvbm.engines.vllm import compat, fingerprint
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.deferral import Deferrals
from kvbm.engines.vllm.exit import Exit
from kvbm.engines.vllm.groups import Groups, Tables
from kvbm.engines.vllm.hints import take_hint
from kvbm.engines.vllm.idle import MoveSteps
from kvbm.engines.vllm.keys import RequestKeys
from kvbm.engines.vllm.prefetch import Prefetcher
from kvbm.engines.vllm.queue import QueuedFetches
from kvbm.engines.vllm.request import RequestState
from kvbm.engines.vllm.resets import Resets
from kvbm.engines.vllm.services import Services
from kvbm.engines.vllm.steps import follow_tables, work_of
from kvbm.engines.vllm.stores import Stores
from kvbm.engines.vllm.weight_changes import WeightChanges
from kvbm.engines.vllm.worker import WorkerAdapter, find_local
from kvbm.plans import AdapterUse, Copy, Hello, LoadPlan, Report, StepPlan, StorePlan
from kvbm.runtime.leader import Leader
from kvbm.tiers import registry

logger = logging.getLogger("kvbm")

MAX_FAILURES = 3  # loads of a request that may fail before all that it lacks is computed
# After so many steps without anything to compute, no step with work is under way, even with overlapping steps.
STILL_STEPS = 10


class SchedulerAdapter:
    """Called by the connector from vLLM's scheduler thread."""

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any, groups: Groups, faults: Faults) -> None:
        self._config = config
        self._faults = faults
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._ranks = vllm_config.parallel_config.world_size
        self._block_size = vllm_config.cache_config.block_size
        outlives = registry.outlives_engine(config)
        self._reuses_hashes = fingerprint.reuses_engine_hashes(vllm_config, kv_cache_config, outlives)
        self._cache = fingerprint.describe(vllm_config, kv_cache_config) if outlives else None
        self._groups = groups
        self._drops_last_block = compat.drops_last_block(vllm_config)
        self._clears_before_fences = compat.clears_before_fences(vllm_config, kv_cache_config)
        self._prefills_whole_prompts = compat.prefills_whole_prompts(vllm_config)
        self._decode_tokens, may_layer = compat.layer_hooks(vllm_config)
        self._may_layer = may_layer and not groups.apart
        self.session = Session(
            "vLLM", config, faults, self._block_size,
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            hidden_size=vllm_config.model_config.get_hidden_size(),
            layers_from=self._decode_tokens + 1 if self._may_layer else inf,
            outside_only=groups.apart,
            used=groups.used if groups.apart else None,
        )  # fmt: skip
        self.observer, self._cost, self._steps = self.session.observer, self.session.cost, self.session.steps
        self._requests: dict[str, RequestState] = {}
        self._loads: list[LoadPlan] = []
        self._uses: list[AdapterUse] = []  # adapters that the next step's plan depends on
        self._drain_stores: list[int] = []  # stores that must be over before the next step
        self.unheard: dict[str, int] = {}  # loads that vLLM has not heard the end of, by waiting request
        self.resets = Resets(self._steps, self.unheard)
        self._hopeless = 0  # loads that could not be planned
        self._active: set[str] = set()  # requests that have been in a batch and are not finished
        self._still_steps = 0  # in a row, with nothing to compute
        self._keys: RequestKeys | None = None
        self._adapters: Adapters | None = None
        self._deferrals: Deferrals | None = None
        self._stores: Stores | None = None
        self._queue: QueuedFetches | None = None  # where a tier is remote
        self._prefetcher: Prefetcher | None = None  # where the only worker can be reached before the step
        self._only_worker: WorkerAdapter | None = None  # where the thread that schedules steps submits them too
        self.block_pool: Any = None  # vLLM's own, to ask what it still has
        self._services = Services("vLLM", faults)
        self._moves = MoveSteps(self.session, faults)
        self._exit = Exit(self.session, faults, self.apply)
        self._weights = WeightChanges(self.reset, self.switch_off)

    @property
    def leader(self) -> Leader | None:
        return self.session.leader

    # -- start and end ------------------------------------------------------------------------------------------------

    def meet(self, hellos: Sequence[Hello]) -> None:
        """All workers have registered their caches: the leader can begin, unless no worker has one to serve."""
        if not hellos:
            return
        ranks = {hello.rank for hello in hellos}
        if ranks != set(range(self._ranks)):
            logger.warning(
                "KVBM stays out of the way: workers of ranks %s take part, expected 0 to %d, and the log of the other "
                "workers says why. vLLM runs as if it were not configured.",
                sorted(ranks), self._ranks - 1,
            )  # fmt: skip
            return
        vllm_config = self._vllm_config
        leader = self.session.begin(hellos, self._cache)
        leader.on_ended_load = self._load_ended
        engine_id = vllm_config.kv_transfer_config.engine_id
        local = [worker for rank in range(self._ranks) if (worker := find_local(engine_id, rank)) is not None]
        if len(local) == self._ranks:
            self._exit.follow(local)
        self._only_worker = local[0] if self._ranks == 1 and local else None
        lora, in_any_step = getattr(vllm_config, "lora_config", None), compat.loads_adapters_in_any_step(vllm_config)
        self._adapters = Adapters(self._ranks, in_any_step, self._only_worker, getattr(lora, "max_loras", 1))
        namespace = fingerprint.namespace(vllm_config, hellos)
        self._keys = RequestKeys(namespace, self._reuses_hashes, self._adapters)
        self._deferrals = Deferrals(leader.manager, self._cost, self._block_size, self.session.block_bytes)
        self._stores = Stores(self.session, self._keys, self._groups, self._services.describe, self._faults)
        if leader.manager.remote and not self._groups.apart:
            self._queue = QueuedFetches(leader, self._keys, self._block_size, self._decide, self._is_on_device)
        if self._only_worker is not None and self._may_layer:
            self._prefetcher = Prefetcher(
                leader, self._only_worker, self._keys, self._block_size, self._decide, self._is_on_device, self._faults
            )
        hashes = "vLLM's hashes" if self._reuses_hashes else "KVBM's own hashes"
        self._services.start(
            self._config, vllm_config, self._kv_cache_config, self.session, self._groups, hashes,
            lambda: compat.engine_blocks(self.block_pool),
        )  # fmt: skip

    def close(self) -> None:
        seconds = self._exit.close()
        try:
            self._services.close()
        finally:
            self.session.close(seconds)

    # -- finding ------------------------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        if self._keys is not None:
            self._keys.forget(request.request_id)  # of an earlier request of this name that has not ended here
        hint = take_hint(self.leader, request)
        self._requests[request.request_id] = RequestState(request, self._tenant_of(request), hint)
        if self._queue is not None:
            self._queue.arrived(request, hint)
        if self._prefetcher is not None:
            self._prefetcher.arrived(request, alone=not self._active)

    def _tenant_of(self, request: Any) -> int:
        return self.session.tenant_of(getattr(request, "cache_salt", None))

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be brought back beyond those vLLM has, whether that happens outside of the step)."""
        if self.resets.hold_requests(self.leader):
            return None, False
        if self.leader is None or self._keys is None or self._adapters is None or self._deferrals is None:
            return 0, False
        if self._only_worker is not None:
            self._weights.hear(0, self._only_worker.weight_changes, self.block_pool)
            if self.leader is None:
                return 0, False
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request, self._tenant_of(request))
        stuck = self._is_stuck(state)
        state.match, state.local_tokens, state.deferred = None, computed_tokens, False
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            state.loaded = range(0)
            self._adapters.refresh()
        weights = None if lora is None else self._keys.bind(request)
        if state.comes_back():
            return None, False
        if state.put_off and self._deferrals.for_room(state, state.put_off, self._loads):
            return None, False  # so far this step is as full as the last one was: no need to look again
        # With several groups the step in which a request runs does not check that the adapter is still the one that the
        # loaded blocks depend on.
        unchecked = lora is not None and self._groups.apart
        if stuck or state.refused or unchecked or compat.needs_every_token(request):
            self.session.skip(state, request.num_tokens, computed_tokens)
            return 0, False
        wanted = self.session.wanted(state, request.num_tokens, computed_tokens)
        if wanted is None:
            return 0, False
        start, limit = wanted
        if lora is not None and weights is None:
            if self._adapters.ask(lora, others_run=bool(self._active)):
                return None, False
            self._keys.bind(request)
        keys = self._keys.of(request)
        found = self._groups.find(self.leader.manager, keys, start, limit, hint=state.hint)
        if found.pending:
            state.deferred = self._deferrals.for_block(state, found, request.num_tokens)
            if state.deferred:
                return None, False
            if not self._deferrals.ends_at(found):
                found = self._groups.find(self.leader.manager, keys, start, limit, False, state.hint)
        if self._drops_last_block:
            found = found.cut(found.blocks - 1)
        if self._prefills_whole_prompts and (start + found.blocks) * self._block_size != request.num_tokens - 1:
            found = found.cut(0)
        decision = self._decide(request, found)
        if not self.session.consider(state, found, decision, request.num_tokens, limit):
            return 0, False
        if decision.in_step and self._deferrals.for_room(state, decision.blocks, self._loads):
            return None, False
        # Else it has waited long enough for a step.
        in_step = decision.in_step and (not state.put_off or self._config.onboard == "sync")
        self.session.offer(state, found, decision, in_step)
        may_extend = not self._groups.apart and not self._drops_last_block
        if may_extend and not state.in_step and self._others_go_on(request.request_id):
            self.session.add_last_block(state, keys, request.num_tokens)
        assert state.match is not None
        return state.match.blocks * self._block_size, not state.in_step

    def _is_stuck(self, state: RequestState) -> bool:
        """Whether vLLM had no room for an offered load outside of the step, and no running request will free any.

        vLLM reserves room for a request that waits for a load, also after the load has failed. It requires more room
        before a load than before computing.
        """
        assert self.leader is not None
        in_vain = state.match is not None and not state.in_step
        return in_vain and self._still_steps >= STILL_STEPS and not self.leader.loads

    def _decide(self, request: Any, found: Match) -> Decision:
        """How much of a match to load, and where."""
        others = self._others_go_on(request.request_id)
        whole = self._groups.apart or self._prefills_whole_prompts
        return self.session.decide(found, request.num_tokens, others, whole, self._groups.moved(found.blocks))

    def _is_on_device(self, key: Key) -> bool:
        return compat.is_on_device(self.block_pool, key)

    def _others_go_on(self, request_id: str) -> bool:
        """Whether a long step delays other requests. One whose last token a running step computes is not delayed."""
        for other in self._active:
            state = self._requests.get(other)
            if other != request_id and not (state is not None and compat.has_its_last_token(state.request)):
                return True
        loading = (self._requests.get(load.request) for load in self._loads)
        return any(state is not None and compat.tokens_left(state.request) > 1 for state in loading)

    @gil.short_turns()
    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM has allocated the request's blocks: load those of the external tokens."""
        state = self._requests.get(request.request_id)
        if not external_tokens:
            if self._prefetcher is not None:
                self._prefetcher.not_loaded(request.request_id)
            if state is not None:
                self.session.admit(state)
            return
        tables, count = blocks.get_block_ids(), external_tokens // self._block_size
        try:
            self._loads.append(self._plan_load(request, state, tables, count))
        except Exception as error:
            # vLLM counts on these blocks already. A plan that no worker can follow makes them all report a failed load,
            # which is how vLLM learns to compute them.
            self._faults.record("planning a load", error)
            self._hopeless += 1
            start, end, in_step = 0, len(tables[0]), not self._groups.apart
            if state is not None:
                in_step, state.refused, state.outside = state.in_step, True, not state.in_step
                if state.match is not None:
                    # No others: those in front of them are good, and may be shared with requests that are running.
                    start, end = state.match.start, state.match.start + count
            targets = list(self._groups.targets(tables, start, end - start))
            copies = [Copy(registry.NEAR.name, [-1] * len(targets), targets)]
            self._loads.append(LoadPlan(-self._hopeless, request.request_id, copies, in_step))
            return
        plan = self._loads[-1]
        if self._prefetcher is not None:
            if getattr(request, "lora_request", None) is None:
                self._prefetcher.load_planned(plan)
            else:
                self._prefetcher.let_go()  # the step decides whether the adapter is the one that the blocks depend on
        if state is not None:
            self.session.admit(state, plan, count)

    def others_write(self, blocks: Sequence[int]) -> None:
        """Another connector fills these blocks, outside of the engine's order: the stores that read them end first. On
        a GPU a fence is not enough: it holds back the engine's stream and no other."""
        if self.leader is not None:
            self._drain_stores += self.leader.fences(blocks)

    def _plan_load(self, request: Any, state: RequestState | None, tables: Tables, count: int) -> LoadPlan:
        if self.leader is None or self._keys is None or state is None or state.match is None:
            raise RuntimeError(f"vLLM expects {count} blocks that were never offered")
        match, targets = self._groups.place(self.leader.manager, state.match, tables, count)
        left = request.num_tokens - (state.match.start + count) * self._block_size
        layered = self._may_layer and left > self._decode_tokens
        start = state.match.start
        plan = self.session.load(state, match, targets, count, layered, left)
        if (weights := self._keys.bound_weights(request)) is not None:
            state.loaded = range(start, start + count)
            if state.in_step or self._groups.apart:
                self._uses.append(weights.used_by(loads=[plan.id]))
        state.loads, state.outside = True, not state.in_step
        if state.outside:
            self.unheard[state.name] = plan.id
        return plan

    def _is_waiting(self) -> bool:
        """Whether a request waits for a load outside of the step, or for a block that is looked for or written."""
        return bool(self.unheard) or any(state.deferred for state in self._requests.values())

    # -- keeping ------------------------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        if not output.total_num_scheduled_tokens and not self._loads and self._is_waiting():
            gil.give_turn(others_notify=self._only_worker is not None)
        loads, self._loads = self._loads, []
        drain_stores, self._drain_stores = self._drain_stores, []
        stores: list[StorePlan] = []
        fences: list[int] = []
        self.session.finalize()
        try:
            fences = self._follow_tables(output)
        except Exception as error:
            # Without the block tables the leader does not know which request owns a block, nor which copies the step
            # would overwrite: the step waits for all copies, and a request stores nothing until it gets a new table.
            self._faults.record("following block tables", error)
            for state in self._requests.values():
                state.tables = None
            fences = list(self.leader.stores_in_flight()) if self.leader else []
        try:
            if self._stores is not None:
                self._stores.plan(output, self._requests, stores, self._uses)
        except Exception as error:
            self._faults.record("planning stores", error)
        self._still_steps = 0 if output.num_scheduled_tokens else self._still_steps + 1
        try:
            if self._queue is not None and self.leader is not None:
                self._queue.fetch(self._line())
            if self._prefetcher is not None:
                self._prefetcher.step_planned(loads, self._line())
        except Exception as error:
            self._faults.record("prefetching", error)
        try:
            waits = any(load.in_step for load in loads)
            work = work_of(output, self._decode_tokens, waits)
            self._steps.scheduled(work, time.monotonic())
            if work.decodes and self._only_worker is not None:
                gil.decoding.begin()
        except Exception as error:
            self._faults.record("timing a step", error)
        verdicts = {} if self.leader is None else self.leader.take_verdicts()
        uses, self._uses = self._uses, []
        wanted = [] if self._adapters is None else self._adapters.take_wanted(bool(output.num_scheduled_tokens))
        return StepPlan(
            loads, stores, fences, moves=self._moves.plan(), drain_stores=drain_stores, verdicts=verdicts,
            adapters=uses, wanted=wanted, changes_heard=self._weights.heard(self._ranks),
            unheard=list(self.unheard.values()),
        )  # fmt: skip

    def _line(self) -> Iterator[RequestState]:
        """Requests that have not had a block yet, in the order in which they came."""
        return (state for name, state in self._requests.items() if not state.loads and name not in self._active)

    def _follow_tables(self, output: Any) -> list[int]:
        """Bring the block tables up to date; returns the copies that must be over before this step writes."""
        written = follow_tables(output, self._requests, self._block_size, self._admit)
        self._active.update(output.num_scheduled_tokens)
        return self.leader.fences(written, self._clears_before_fences) if self.leader else []

    def _admit(self, state: RequestState, tables: Tables, computed: int) -> None:
        """A request has new block tables, and starts to compute behind so many tokens."""
        outside = state.outside
        state.new_tables(tables, computed)
        if state.local_tokens and self._weights.has_stale_blocks(self.block_pool):
            state.keep = False
        lora = getattr(state.request, "lora_request", None)
        if lora is None or self._adapters is None or self._keys is None:
            return
        weights, loaded = self._keys.bound_weights(state.request), state.loaded
        trusted = self._adapters.admit(lora, weights, self.block_pool)
        if (state.local_tokens and not trusted) or computed > state.local_tokens + len(loaded) * self._block_size:
            state.keep = False  # it goes on from blocks of other weights, or of another connector
        if self._groups.apart:
            state.keep = False  # no request would find its blocks
        elif outside and loaded and weights is not None:
            blocks = tables[0][loaded.start : loaded.stop]
            self._uses.append(weights.used_by(blocks=blocks))

    # -- ends ---------------------------------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """vLLM has taken in the results of the oldest step under way."""
        self._steps.ended(time.monotonic())

    def take_events(self) -> list[Any]:
        return self._services.take_events(self.block_pool)

    def lost(self, blocks: set[int]) -> None:
        """These blocks of the engine's only table did not arrive. A step may have computed on them, and vLLM has taken
        its blocks into its own prefix cache; it means to compute them again, but may preempt the request before it gets
        there."""
        spoiled: set[int] = set()
        for state in self._requests.values():
            table = state.tables[0] if state.tables is not None else []
            if blocks.isdisjoint(table):
                continue
            first = next(i for i, block in enumerate(table) if block in blocks)
            spoiled.update(table[first:])
            if not compat.recovers_exactly(self._vllm_config):
                state.keep = False
        if spoiled:
            compat.forget_on_device(self.block_pool, spoiled)

    def apply(self, reports: Sequence[Report]) -> None:
        if self.leader is None:
            return
        self.session.note_faults(reports)
        for report in reports:
            self._weights.hear(report.rank, report.weight_changes, self.block_pool)
        leader = self.leader
        if leader is None:
            return  # new weights, and the old blocks could not be dropped
        if any(report.stores or report.moves for report in reports):
            self._moves.progressed()
        try:
            if self._adapters is not None and any(report.adapters for report in reports):
                self._adapters.apply(reports)
            leader.apply(reports)
        except Exception as error:
            self.switch_off(error)

    def switch_off(self, error: Exception) -> None:
        self.session.switch_off(error)
        self._stores = self._prefetcher = None
        self._services.withdraw_events()

    def _load_ended(self, plan: LoadPlan, absent: set[int]) -> None:
        """Count failures: a block that a slower tier did not deliver is still found there, and would fail for ever."""
        state = self._requests.get(plan.request)
        if absent and state is not None:
            state.failures += 1
            state.refused = state.refused or state.failures >= MAX_FAILURES

    def finished(self, request: Any) -> None:
        state = self._requests.pop(request.request_id, None)
        self._active.discard(request.request_id)
        if self._prefetcher is not None:
            self._prefetcher.not_loaded(request.request_id)
        if self._keys is None:
            return
        keys = self._keys.of(request)
        self._keys.forget(request.request_id)
        state = state or RequestState(request)
        state.turn = from_params(
            request.kv_transfer_params, getattr(request, "session_id", None), getattr(request, "priority", 0)
        )
        # vLLM sends the request's last token after this call. Its engine process then plans a step, if only to tell the
        # workers; an engine in the caller's own process plans it with the next request, or ends.
        self.session.finish(state, request.num_output_tokens, keys, later=True)

    def reset(self) -> bool:
        """Forget every block."""
        try:
            if self._prefetcher is not None:
                self._prefetcher.let_go()
        finally:
            self.session.reset(self._requests.values())
        return True

    @property
    def serving(self) -> bool:
        return bool(self._active)

    @property
    def changes(self) -> tuple[int, ...]:
        """A value that changes with every figure."""
        counts = self.session.counts
        return (
            self.observer.log.changes,
            self.leader.plans_under_way if self.leader is not None else 0,
            counts.refused_store_blocks,
            sum(counts.refused_load_blocks.values()),
            sum(self._faults.counts.values()),
        )

    @property
    def busy(self) -> bool:
        """Stores, events or the end of a load are pending: vLLM must go on stepping to deliver them. A request may be
        answered before the end of its load is known, if that was announced."""
        if self._services.owes_events or (leader := self.leader) is None:
            return self._services.owes_events
        return leader.owes_verdicts or leader.plans_under_way > 0 or self._moves.are_wanted()
