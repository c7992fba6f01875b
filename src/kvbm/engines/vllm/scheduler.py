"""The scheduler's half: follows every request through vLLM's scheduler and drives the leader."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import kvbm
from kvbm.config import Config
from kvbm.control.presence import Presence
from kvbm.control.socket import Controller
from kvbm.core.cost import RECOMPUTE, CostModel, Decision
from kvbm.core.keys import Key, Namespace
from kvbm.core.manager import Match
from kvbm.engines.guard import Faults
from kvbm.engines.vllm import compat, feed, fingerprint
from kvbm.engines.vllm.adapters import Adapters
from kvbm.engines.vllm.deferral import Deferrals
from kvbm.engines.vllm.groups import Groups, Tables
from kvbm.engines.vllm.keys import RequestKeys
from kvbm.engines.vllm.prefetch import Prefetcher
from kvbm.engines.vllm.reporting import ON_DEVICE, SKIPPED, TOO_SHORT, Lookup, admission, identity, say_ready
from kvbm.engines.vllm.request import Ended, RequestState
from kvbm.engines.vllm.steps import work_of
from kvbm.engines.vllm.stores import Stores
from kvbm.engines.vllm.worker import WorkerAdapter, find_local
from kvbm.events import launch
from kvbm.observe.observer import Observer
from kvbm.plans import AdapterUse, Copy, Hello, LoadPlan, MovePlan, Report, StepPlan, StorePlan
from kvbm.runtime import flush
from kvbm.runtime.leader import Counts, Leader
from kvbm.runtime.steps import StepTimes
from kvbm.runtime.tiers import DiskTier, agreed_weights, make_manager, measured
from kvbm.tiers import registry
from kvbm.tiers.host.persistent_host import PersistentHost
from kvbm.transfer import gil

logger = logging.getLogger("kvbm")

# A load from disk that takes longer than computing would have is given up, but none before so many seconds: what is
# expected of steps of milliseconds is not that exact.
SHORTEST_LOAD = 1.0

# Without requests vLLM steps on for moves only while their stores make progress.
MAX_MOVE_STALL_SECONDS = 2.0

# vLLM stops stepping when it is told that there is no work. When it asks again so much later, something woke it up.
ASLEEP_SECONDS = 0.5

# Loads of a request that may fail before all that it lacks is computed.
MAX_FAILURES = 3

# After so many steps without anything to compute none is under way any more, however many overlap.
STILL_STEPS = 10

# Blocks from which on the end of a request is work that others would notice.
LONG_PROMPT = 256


class SchedulerAdapter:
    """Called by the connector from vLLM's scheduler thread."""

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any, groups: Groups, faults: Faults) -> None:
        self.leader: Leader | None = None  # until the workers have said how much room they have
        self.counts = Counts()
        self._config = config
        self._faults = faults
        self._vllm_config = vllm_config
        self._ranks = vllm_config.parallel_config.world_size
        self._block_size = vllm_config.cache_config.block_size
        self._engine_blocks = kv_cache_config.num_blocks
        self._reuses_hashes = fingerprint.reuses_engine_hashes(vllm_config, kv_cache_config, config.outlives_engine)
        self._cache = fingerprint.describe(vllm_config, kv_cache_config) if config.outlives_engine else None
        self._disk: DiskTier | None = None
        self._kept: PersistentHost | None = None
        self._move_progress = 0.0  # when there was something new for the disk, or from it
        self._asked = 0.0  # when vLLM last asked whether to step for moves
        self._steps_for_moves = False  # the answer to that
        self._local: list[WorkerAdapter] = []  # all workers, where they are in this process
        self._flush_deadline: float | None = None  # once the end has begun
        self._flushed = True  # in time
        self._requests: dict[str, RequestState] = {}
        self._loads: list[LoadPlan] = []
        self._uses: list[AdapterUse] = []  # adapters that the next step's plan depends on
        self._drain_stores: list[int] = []  # stores that must be over before the next step
        self._hopeless = 0  # loads that could not be planned
        self._ended: list[Ended] = []  # requests that are not seen off yet
        self._active: set[str] = set()  # requests that have been in a batch and are not finished
        self._still_steps = 0  # in a row, with nothing to compute
        self._groups = groups
        self._drops_last_block = compat.drops_last_block(vllm_config)
        self._prefills_whole_prompts = compat.prefills_whole_prompts(vllm_config)
        self._decode_tokens, self._may_layer = compat.layer_hooks(vllm_config)
        if groups.apart:
            self._may_layer = False
        self._cost = CostModel(
            registry.priors(),
            step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            layers_from=self._decode_tokens + 1 if self._may_layer else inf,
            attention_span=4 * vllm_config.model_config.get_hidden_size(),
            mode="async" if groups.apart else config.onboard,
            load=config.load,
        )
        self._steps = StepTimes(self._cost)
        self.observer = Observer(config, faults.counts)
        self._block_bytes = 0  # of the rank that has the most to move
        self._keys: RequestKeys | None = None
        self._adapters: Adapters | None = None
        self._waits: Deferrals | None = None
        self._stores: Stores | None = None
        self._ahead: Prefetcher | None = None  # where the only worker can be reached before the step
        self._submits = False  # the thread that schedules steps submits them too
        self._only_worker: WorkerAdapter | None = None  # where it can be reached
        self._weight_changes: dict[int, int] = {}  # by rank, as far as they were heard of
        self._stale: Any = None  # generation of vLLM's prefix cache at the last of them: it holds KV of old weights
        self.block_pool: Any = None  # vLLM's own, to ask what it still has
        self._kv_cache_config = kv_cache_config
        self._feed: feed.EventFeed | None = None  # while vLLM publishes events
        self._consolidator: launch.ConsolidatorProcess | None = None  # for who wants it
        self._presence: Presence | None = None

    # -- start --------------------------------------------------------------------------------------------------------

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
        layouts = {hello.layout for hello in hellos}
        by_rank = [hello.block_bytes for hello in hellos]
        kept = [hello.block_bytes / hello.shared_by for hello in hellos]
        self._block_bytes, block_bytes = max(by_rank), round(sum(kept))
        parallel, model = self._vllm_config.parallel_config, self._vllm_config.model_config
        namespace = Namespace(
            model=f"{model.model}@{getattr(model, 'revision', None) or ''}",
            dtype=f"{model.dtype}/{self._vllm_config.cache_config.cache_dtype}",
            layout=" ".join(sorted(layouts)),
            block_size=self._block_size,
            tensor_parallel=parallel.tensor_parallel_size,
            pipeline_parallel=parallel.pipeline_parallel_size,
        )
        if self._cache is not None:
            weights = agreed_weights(hellos)
            self._cache = {**self._cache, "weights": weights} if weights else None
        if self._cache is not None and self._config.has_disk_tier:
            self._disk = DiskTier.open(self._config, hellos, self._cache)
        manager = make_manager(hellos, self._disk)
        if self._cache is not None and self._config.host_persist:
            self._kept = PersistentHost.open(self._config, hellos, self._cache, manager)
        engine_id = self._vllm_config.kv_transfer_config.engine_id
        local = [worker for rank in range(self._ranks) if (worker := find_local(engine_id, rank)) is not None]
        if len(local) == self._ranks:
            self._local = local
            for each in local:
                each.before_close = self._flush
        worker = local[0] if self._ranks == 1 and local else None
        in_any_step = compat.loads_adapters_in_any_step(self._vllm_config)
        lora = getattr(self._vllm_config, "lora_config", None)
        self._adapters = Adapters(self._ranks, in_any_step, worker, getattr(lora, "max_loras", 1))
        self._keys = RequestKeys(namespace, self._reuses_hashes, self._adapters)
        pending = self._config.max_pending_offloads
        self.leader = Leader(manager, self._ranks, pending, by_rank, self._cost, self.observer.log, block_bytes)
        self.leader.on_ended_load = self._load_ended
        self._waits = Deferrals(manager, self._cost, self._block_size, self._block_bytes)
        self._stores = Stores(
            self.leader, self._keys, self._groups, self._block_size, self._config.offload_decode, self._describe,
            self._faults,
        )  # fmt: skip
        self._submits = worker is not None
        self._only_worker = worker
        if worker is not None and self._may_layer:
            self._ahead = Prefetcher(
                self.leader,
                worker,
                self._keys,
                self._block_size,
                self._decide,
                lambda key: compat.is_on_device(self.block_pool, key),
                self._faults,
            )
        if self._disk is not None:
            self._disk.serve(self._config, self.leader)
        for tier in manager.catalogs:
            if (rate := measured(hellos, tier)) is not None:
                self._cost.start_from(tier, rate)
        self.counts = self.leader.counts
        hashed = compat.hashed_tokens(self._vllm_config, self._kv_cache_config)
        if feed.is_wanted(self._vllm_config) and self._groups.apart:
            logger.warning(
                "KV events do not tell what KVBM holds: layers of this model see different parts of a prompt"
            )
        elif feed.is_wanted(self._vllm_config) and hashed == self._block_size:
            group = self._kv_cache_config.kv_cache_groups[0]
            self._feed = feed.EventFeed(manager.catalogs, self._block_size, group)
            if self._config.kv_events_enable_consolidator == "on":
                source, _ = feed.consolidator_endpoints(self._config, self._vllm_config)
                rank, count = parallel.data_parallel_index, self._faults.count
                self._consolidator = launch.start(self._config, [source], rank, count=count)
        about = identity(self._vllm_config, self._config, self._ranks, block_bytes, self._engine_blocks)
        hashes = "vLLM's hashes" if self._reuses_hashes else "KVBM's own hashes"
        shared = block_bytes < sum(by_rank)
        say_ready(about, manager.catalogs, self._config.has_host_tier, shared, hashes)
        parallel_rank = getattr(parallel, "data_parallel_rank_local", None) or 0
        self.observer.start(about, lambda: self.leader, self._cost, who=f"engine {engine_id}", replica=parallel_rank)
        self._presence = self._appear(parallel_rank)

    def _appear(self, replica: int) -> Presence:
        """Be reachable from outside from now on."""
        engine, model = self._vllm_config.kv_transfer_config.engine_id, self._vllm_config.model_config
        name = str(getattr(model, "served_model_name", None) or model.model)
        about = {"engine": engine, "rank": replica, "model": name, "kvbm": kvbm.__version__}
        controller = Controller(
            self._faults.engine_lock,
            lambda: self.leader,
            about,
            self._announce,
            lambda: compat.engine_blocks(self.block_pool),
        )
        metrics = self.observer.server.url if self.observer.server is not None else ""
        return Presence(self._config, controller, f"{engine}-{replica}", name, self._ranks, metrics)

    def _announce(self) -> bool:
        """Have all blocks told once more; False when nobody listens."""
        if self._feed is not None:
            self._feed.tell_again()
        return self._feed is not None

    def _flush(self) -> None:
        """Finish what is on its way to disk. Runs once, when the scheduler's or the first worker's half is closed."""
        if self._flush_deadline is not None:
            return
        with self._faults.engine_lock:
            self._flush_deadline = time.monotonic() + flush.FLUSH_SECONDS
            self._finalize()
            if not self._local or (self._disk is None and self._kept is None):
                return  # nothing to be done, or nothing that would outlive this engine
            try:
                self._flushed = flush.flush(lambda: self.leader, self._local, self.apply, self._flush_deadline)
            except Exception as error:
                self._flushed = False
                self._faults.record("flushing to disk", error)
            if not self._flushed:
                for worker in self._local:
                    worker.hurry_stores()

    def close(self) -> None:
        self._flush()
        if self.leader is not None and (lost := flush.unwritten(self.leader, self._flushed, bool(self._local))):
            logger.warning("disk tier: %s. The next engine computes these blocks again", lost)
        self.observer.close()
        if self._presence is not None:
            self._presence.close()
        if self._consolidator is not None:
            self._consolidator.close()
        if self._disk is not None:
            assert self._flush_deadline is not None
            self._disk.index.close(max(1.0, self._flush_deadline - time.monotonic()))
        if self._kept is not None:
            self._kept.close()

    # -- finding ------------------------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        if self._keys is not None:
            self._keys.forget(request.request_id)  # of an earlier request of this name that has not ended here
        self._requests[request.request_id] = RequestState(request)
        if self._ahead is not None:
            self._ahead.arrived(request, alone=not self._active)

    def match(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """(tokens that can be brought back beyond those vLLM has, whether that happens outside of the step)."""
        if self.leader is None or self._keys is None or self._adapters is None or self._waits is None:
            return 0, False
        if self._only_worker is not None:
            self._hear_of_weights(0, self._only_worker.weight_changes)
            if self.leader is None:
                return 0, False
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
        stuck = self._is_stuck(state)
        state.match = None
        state.local_tokens = computed_tokens
        lora = getattr(request, "lora_request", None)
        weights = None
        if lora is not None:
            state.loaded = range(0)
            self._adapters.refresh()
            weights = self._keys.bind(request)
        if self._comes_back(state):
            return None, False
        if state.put_off and self._waits.for_room(state, state.put_off, self._loads):
            return None, False  # so far this step is as full as the last one was: no need to look again
        # With several groups the step in which a request runs does not check that the adapter is still the one that the
        # loaded blocks depend on.
        unchecked = lora is not None and self._groups.apart
        if stuck or state.refused or unchecked or compat.needs_every_token(request):
            state.lookup = Lookup(computed_tokens, SKIPPED)
            return 0, False
        start = computed_tokens // self._block_size
        # One token at least is left to compute: the engine needs its logits.
        limit = (request.num_tokens - 1) // self._block_size
        if computed_tokens % self._block_size or limit <= start:
            state.lookup = Lookup(computed_tokens, ON_DEVICE if start else TOO_SHORT)
            return 0, False
        if lora is not None and weights is None:
            if self._adapters.ask(lora, others_run=bool(self._active)):
                return None, False
            self._keys.bind(request)
        keys = self._keys.of(request)
        found = self._groups.find(self.leader.manager, keys, start, limit)
        if found.pending:
            if self._waits.for_block(state, found, request.num_tokens):
                return None, False
            found = self._groups.find(self.leader.manager, keys, start, limit, wait_for_writers=False)
        if self._drops_last_block:
            found = found.cut(found.blocks - 1)
        if self._prefills_whole_prompts and (start + found.blocks) * self._block_size != request.num_tokens - 1:
            found = found.cut(0)
        decision = self._decide(request, found)
        state.lookup = Lookup(computed_tokens, limit=limit, found=found, decision=decision)
        if decision.blocks < found.blocks and not state.declined:
            # Once a request, however often vLLM asks for it.
            state.declined = True
            self._cost.observe_refusal(found.beyond(decision.blocks))
            reason = RECOMPUTE if decision.blocks else decision.reason
            refused = self.counts.refused_load_blocks
            refused[reason] = refused.get(reason, 0) + found.blocks - decision.blocks
        if not decision.blocks:
            return 0, False
        if decision.in_step and self._waits.for_room(state, decision.blocks, self._loads):
            return None, False
        state.match = found.cut(decision.blocks)
        forced = self._config.onboard == "sync"
        state.in_step = decision.in_step and (forced or not state.put_off)  # else it has waited long enough for a step
        # By then it would have been computed. A load that the user forces is waited for while anything comes at all.
        state.deadline_seconds = max(decision.recompute_seconds, SHORTEST_LOAD) if self._config.load == "auto" else 0.0
        may_extend = not self._groups.apart and not self._drops_last_block
        if may_extend and not state.in_step and self._others_go_on(request.request_id):
            self._go_to_the_end(request, keys, state)
        return state.match.blocks * self._block_size, not state.in_step

    def _go_to_the_end(self, request: Any, keys: Sequence[Key], state: RequestState) -> None:
        """Add the last block of a prompt to a match that leaves out nothing else, if it lies in the same tier.

        For a load beside requests that decode. vLLM then computes the last token once more and nothing else, in a step
        that is like any other for them; a block's worth of tokens makes it one of a prompt, three times as long. Alone
        a prompt has its last block computed, as vLLM does with one that the GPU has kept: so its answers are the same
        to the last bit. Beside others they depend on those others in any case.
        """
        assert self.leader is not None
        assert state.match is not None
        assert state.lookup is not None
        last = state.match.start + state.match.blocks
        if (last + 1) * self._block_size != request.num_tokens:
            return
        more = self.leader.manager.lookup(keys, last, last + 1).runs
        if more and more[0].tier == state.match.runs[-1].tier:
            state.match = state.match.extended(more[0], keys)
            state.lookup = state.lookup._replace(limit=last + 1, found=state.match)

    def _comes_back(self, state: RequestState) -> bool:
        """Whether a load outside of the step has left a request with nothing at all.

        vLLM then has it first in line, before others that hold blocks and only wait for their turn. Should there be no
        room for it beside them, none of them would ever go on. Who is asked to come again stands behind them.
        """
        outside, state.outside = state.outside, False
        return outside

    def _is_stuck(self, state: RequestState) -> bool:
        """Whether a load outside of the step was offered in vain, and nothing goes on that could make room for it.

        vLLM keeps room for whoever was to be loaded, and goes on doing so when that load has failed. It asks for more
        of it before a load than before computing.
        """
        assert self.leader is not None
        in_vain = state.match is not None and not state.in_step
        return in_vain and self._still_steps >= STILL_STEPS and not self.leader.loads_under_way

    def _decide(self, request: Any, found: Match) -> Decision:
        """How much of a match to load, and where."""
        computed = found.start * self._block_size
        others = self._others_go_on(request.request_id)
        rest = request.num_tokens - computed
        whole = self._groups.apart or self._prefills_whole_prompts
        size = self._block_bytes * self._groups.moved(found.blocks) // max(found.blocks, 1)
        return self._cost.decide(found, size, self._block_size, computed, rest, others, whole=whole)

    def _others_go_on(self, request_id: str) -> bool:
        """Whether others would notice if the step took long. Who has its last token in a step under way would not."""
        for other in self._active:
            state = self._requests.get(other)
            if other != request_id and not (state is not None and compat.has_its_last_token(state.request)):
                return True
        loading = (self._requests.get(load.request) for load in self._loads)
        return any(state is not None and compat.tokens_left(state.request) > 1 for state in loading)

    @gil.short_turns()
    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """vLLM has given the request its blocks: those of the external tokens are now ours to fill."""
        state = self._requests.get(request.request_id)
        if not external_tokens:
            if self._ahead is not None:
                self._ahead.not_loaded(request.request_id)
            self._record_admission(request, state, None, 0)
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
        if self._ahead is not None:
            if getattr(request, "lora_request", None) is None:
                self._ahead.load_planned(plan)
            else:
                self._ahead.let_go()  # the step decides whether the adapter is the one that the blocks depend on
        self._record_admission(request, state, plan, count)

    def others_write(self, blocks: Sequence[int]) -> None:
        """Somebody else fills these blocks, outside of the engine's order: what still reads them must be over by then.

        On a GPU that is more than a fence, which holds back the engine's stream and nobody else.
        """
        if self.leader is not None:
            self._drain_stores += self.leader.fences(blocks)

    def _record_admission(self, request: Any, state: RequestState | None, plan: LoadPlan | None, loaded: int) -> None:
        """Once for every time a request is let in; vLLM comes here again when a load outside of the step is over."""
        if state is not None and state.lookup is not None:
            seen = admission(request, state.lookup, loaded, self._block_size, self._cost)
            state.lookup = None
            if any(ended.name == request.request_id for ended in self._ended):
                self._finalize()  # the log goes by names, and knows one of a kind at a time
            self.observer.log.admitted(seen, None if plan is None else plan.id)

    def _plan_load(self, request: Any, state: RequestState | None, tables: Tables, count: int) -> LoadPlan:
        if self.leader is None or self._keys is None or state is None or state.match is None:
            raise RuntimeError(f"vLLM expects {count} blocks that were never offered")
        match, targets = self._groups.place(self.leader.manager, state.match, tables, count)
        left = request.num_tokens - (state.match.start + count) * self._block_size
        layered = self._may_layer and left > self._decode_tokens
        plan = self.leader.onboard(
            match, request.request_id, targets, state.in_step, layered, left, state.deadline_seconds
        )
        if (weights := self._keys.bound_weights(request)) is not None:
            state.loaded = range(state.match.start, state.match.start + count)
            if state.in_step or self._groups.apart:
                self._uses.append(weights.used_by(loads=[plan.id]))
        state.loads, state.outside = True, not state.in_step
        state.match = None
        self.counts.matched_tokens += count * self._block_size
        matched = self.counts.matched_blocks
        for copy in plan.copies:
            matched[copy.tier] = matched.get(copy.tier, 0) + len(copy.slots)
        return plan

    # -- keeping ------------------------------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        loads, self._loads = self._loads, []
        drain_stores, self._drain_stores = self._drain_stores, []
        stores: list[StorePlan] = []
        fences: list[int] = []
        self._finalize()
        try:
            fences = self._follow_tables(output)
        except Exception as error:
            # Without the tables we can tell neither which copies are in danger nor whose a block is: the step waits for
            # all copies, and nothing is kept of a request before it gets a new table.
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
            if self._ahead is not None:
                self._ahead.step_planned(loads, self._line())
        except Exception as error:
            self._faults.record("prefetching", error)
        try:
            waits = any(load.in_step for load in loads)
            work = work_of(output, self._decode_tokens, waits)
            self._steps.scheduled(work, time.monotonic())
            if work.decodes and self._submits:
                gil.decoding.begin()
        except Exception as error:
            self._faults.record("timing a step", error)
        verdicts = {} if self.leader is None else self.leader.take_verdicts()
        uses, self._uses = self._uses, []
        wanted = [] if self._adapters is None else self._adapters.take_wanted(bool(output.num_scheduled_tokens))
        heard = [self._weight_changes.get(rank, 0) for rank in range(self._ranks)] if self._weight_changes else []
        return StepPlan(
            loads, stores, fences, moves=self._plan_moves(), drain_stores=drain_stores, verdicts=verdicts,
            adapters=uses, wanted=wanted, changes_heard=heard,
        )  # fmt: skip

    def _line(self) -> Iterator[Any]:
        """Requests that have not had a block yet, in the order in which they came."""
        return (state.request for name, state in self._requests.items() if not state.loads and name not in self._active)

    def _plan_moves(self) -> list[MovePlan]:
        try:
            moves = [] if self.leader is None else self.leader.plan_moves()
        except Exception as error:
            self._faults.record("planning moves", error)
            return []
        if moves:
            self._move_progress = time.monotonic()
        return moves

    def _follow_tables(self, output: Any) -> list[int]:
        """Bring our block tables up to date; returns the copies that must be over before this step writes."""
        size = self._block_size
        written: list[int] = []
        for request_id in getattr(output, "preempted_req_ids", None) or ():
            if (state := self._requests.get(request_id)) is not None:
                state.tables = None
        for new in output.scheduled_new_reqs:
            for table in new.block_ids:
                written += table[new.num_computed_tokens // size :]
            if (state := self._requests.get(new.req_id)) is not None:
                self._admit(state, new.block_ids, new.num_computed_tokens)
                if state.found is None:
                    state.found = new.num_computed_tokens // size
        cached = output.scheduled_cached_reqs
        resumed = compat.resumed_requests(cached)
        for i, request_id in enumerate(cached.req_ids):
            if cached.new_block_ids[i] is None:
                continue
            tables, computed = cached.new_block_ids[i], cached.num_computed_tokens[i]
            state = self._requests.get(request_id)
            if request_id in resumed:
                for table in tables:
                    written += table[computed // size :]
                if state is not None:
                    self._admit(state, tables, computed)
                continue
            for group, fresh in enumerate(tables):
                written += fresh
                if state is not None and state.tables is not None:
                    state.tables[group].extend(fresh)
        self._active.update(output.num_scheduled_tokens)
        return self.leader.fences(written) if self.leader else []

    def _admit(self, state: RequestState, tables: Tables, computed: int) -> None:
        """A request has new block tables, and starts to compute behind so many tokens."""
        outside = state.outside
        state.new_tables(tables, computed)
        if self._weight_changes and state.local_tokens and self._has_stale_blocks():
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

    def _has_stale_blocks(self) -> bool:
        """Whether vLLM's own prefix cache has not been reset since the weights changed, as far as can be seen."""
        return self._stale is None or compat.prefix_cache_generation(self.block_pool) in (None, self._stale)

    def _describe(self, request: Any, keys: Sequence[Key], first: int, end: int) -> None:
        """Once they are on their way: blocks that no tier has, or is about to have, need no description."""
        if self._feed is None:
            return
        try:
            self._feed.follow(request, keys, first, end)
        except Exception as error:
            self._stop_events("describing blocks", error)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """vLLM has taken in the results of the oldest step under way."""
        self._steps.ended(time.monotonic())

    def take_events(self) -> list[Any]:
        """What has become of our tiers' blocks, for vLLM to publish."""
        if self._feed is None:
            return []
        try:
            return self._feed.take(self.block_pool)
        except Exception as error:
            self._stop_events("telling of blocks", error)
            return []

    def _stop_events(self, where: str, error: Exception) -> None:
        self._faults.record(where, error)
        logger.error("No more events of KVBM's blocks: routers will not learn of new ones. vLLM's own go on.")
        if self._feed is not None:
            self._feed.stop()
            self._feed = None

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
        for report in reports:
            for reason, times in report.faults.items():
                self._faults.note(f"rank {report.rank}: {reason}", times)
            if report.weight_changes:
                self._hear_of_weights(report.rank, report.weight_changes)
                if self.leader is None:
                    return
        if any(report.stores or report.moves for report in reports):
            self._move_progress = time.monotonic()
        try:
            if self._adapters is not None and any(report.adapters for report in reports):
                self._adapters.apply(reports)
            self.leader.apply(reports)
        except Exception as error:
            self.switch_off(error)

    def _hear_of_weights(self, rank: int, changes: int) -> None:
        """vLLM does not tell connectors about new weights, so the worker reports them. Drop every block computed with
        the old ones."""
        if self._weight_changes.get(rank, 0) >= changes:
            return
        if not self._weight_changes:
            logger.warning(
                "The weights have changed in memory: KVBM forgets every block, and keeps nothing for the next engine"
            )
        try:
            self.reset()
        except Exception as error:
            self.switch_off(error)
            return
        self._stale = compat.prefix_cache_generation(self.block_pool)
        # Only now: a worker follows plans again as soon as it reads that the leader knows of the change.
        self._weight_changes[rank] = changes

    def switch_off(self, error: Exception) -> None:
        """Books that are half written cannot be trusted, and must not wait for what was lost with the other half."""
        self._faults.record("taking in reports", error)
        if self.leader is None:
            return
        logger.error("KVBM is off from here on: its books are out of step. vLLM goes on without it.")
        self.leader = self._stores = self._ahead = None
        if self._feed is not None:
            self._feed.withdraw()

    def _load_ended(self, plan: LoadPlan, absent: set[int]) -> None:
        """What did not arrive from a slower tier is no worse for it, and would be found again: not for ever."""
        state = self._requests.get(plan.request)
        if absent and state is not None:
            state.failures += 1
            state.refused = state.refused or state.failures >= MAX_FAILURES

    def finished(self, request: Any) -> None:
        state = self._requests.pop(request.request_id, None)
        self._active.discard(request.request_id)
        if self._ahead is not None:
            self._ahead.not_loaded(request.request_id)
        if self._keys is None:
            return
        keys = self._keys.of(request)
        self._keys.forget(request.request_id)
        stored, found = (0, 0) if state is None or not keys else (state.stored, state.found or 0)
        self._ended.append(Ended(request.request_id, request.num_output_tokens, keys, stored, found))
        # Tokens of others wait to be sent meanwhile, and there is time when their next step is being computed.
        if len(keys) < LONG_PROMPT or not self._others_go_on(request.request_id):
            self._finalize()

    def _finalize(self) -> None:
        """What is left to do of requests that have ended. Should it fail for one, it is done for the others."""
        ended, self._ended = self._ended, []
        for request, output_tokens, keys, stored, found in ended:
            try:
                if stored and self.leader is not None:
                    # What it has used is recent now, wherever it was found; its last blocks are the first to go.
                    self.leader.touch(self._groups.used(keys, stored))
                    if found:
                        self.leader.used(self._groups.used(keys, found))
                        self._move_progress = time.monotonic()
                self.observer.log.finished(request, output_tokens, keys)
            except Exception as error:
                self._faults.record("the end of a request", error)

    def reset(self) -> bool:
        """Forget every block. Requests that live on keep nothing more: they may rest on weights that are gone."""
        self._finalize()
        for state in self._requests.values():
            state.keep = False
        if self._ahead is not None:
            self._ahead.let_go()
        if self.leader is not None:
            self.leader.reset()
        self.observer.log.changes += 1
        return True

    @property
    def serving(self) -> bool:
        return bool(self._active)

    @property
    def changes(self) -> tuple[int, ...]:
        """Something else whenever a figure has changed."""
        counts = self.counts
        return (
            self.observer.log.changes,
            self.leader.plans_under_way if self.leader is not None else 0,
            counts.refused_store_blocks,
            sum(counts.refused_load_blocks.values()),
            sum(self._faults.counts.values()),
        )

    @property
    def busy(self) -> bool:
        """Stores on their way, or events: vLLM must go on stepping, or nobody would hear of them."""
        if self._feed is not None and self._feed.owed:
            return True
        if self.leader is None:
            return False
        return self.leader.owes_verdicts or self.leader.stores_under_way or self._moves_progress(self.leader)

    def _moves_progress(self, leader: Leader) -> bool:
        """Whether vLLM has to step on for moves. A store that hangs is not waited for, but it gets another chance when
        vLLM has stopped stepping and wakes up: for a request, for a call from outside, or to end. By then the store may
        have finished writes that the leader has not heard of."""
        now = time.monotonic()
        woken, self._asked = not self._steps_for_moves and now - self._asked > ASLEEP_SECONDS, now
        if woken:
            self._move_progress = now
        has_work = any(edge.can_progress and not leader.breakers[edge.target].late for edge in leader.edges)
        self._steps_for_moves = has_work and now < self._move_progress + MAX_MOVE_STALL_SECONDS
        return self._steps_for_moves
