"""The worker's adapter: registers this rank's KV pool and carries out the leader's plans on it.

Called from the engine's executor thread only. In an iteration with a batch: ``bind``, ``begin``, the forward pass,
``forward_ended``, ``end``, ``poll``; in one without, ``poll`` alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from kvbm.config import Config
from kvbm.engines import weights
from kvbm.engines.guard import Faults
from kvbm.engines.trtllm import compat
from kvbm.engines.trtllm.exchanges import PACKING, WEIGHTS, Exchanges
from kvbm.engines.trtllm.leader import find_local
from kvbm.engines.trtllm.step import StepMeta, decode
from kvbm.plans import Hello, LoadPlan, LoadResult, Recompute, Report, StepPlan, StoreResult
from kvbm.runtime.channel import TIMING, ZmqWorker
from kvbm.runtime.rank import Rank
from kvbm.tiers import registry
from kvbm.tiers.base import Fingerprint
from kvbm.tiers.secret import read_secret

logger = logging.getLogger("kvbm")

# How long a step waits for loads that the leader sent just before the step's metadata, which took the faster way. They
# are on the same machine, so this is hardly ever used up; a load that is later still begins at the end of the step.
MESSAGE_SECONDS = 0.002

# Requests that ended while blocks were on their way to them, remembered so that a plan that comes late is not begun.
ENDED = 4096


class WorkerAdapter:
    def __init__(self, config: Config, setup: compat.Setup, faults: Faults, exchanges: Exchanges) -> None:
        self._config = config
        self._exchanges = exchanges
        self._faults = faults
        self._setup = setup
        self._rank = Rank(
            config, setup.rank, setup.ranks, model=setup.model,
            gather=lambda own: exchanges.gather(own, PACKING),
        )  # fmt: skip
        self._channel: ZmqWorker | None = None
        self._cuda = False
        self._forward_ended: Any = None  # an event on the stream that the engine computes on
        self._called = False  # the engine's callable, in this step
        self._step = StepMeta()
        self._stores_begun = True  # of that step
        self._last_store = 0  # the newest store that has begun here
        self._received = 0  # messages of the channel
        self._late: list[LoadPlan] = []  # loads that came before the stores they must come after
        self._loads: dict[int, int] = {}  # under way: plan -> request
        self._stores: dict[int, int] = {}  # likewise
        self._waiting: set[int] = set()  # requests that the engine holds back for their load
        self._ready: set[int] = set()  # requests whose load is over
        self._orders: dict[int, Recompute] = {}  # set-backs that have not been carried out yet
        self._saving: deque[int] = deque()  # requests that are finished and whose blocks the engine keeps for us
        self._ended: dict[int, None] = {}  # oldest first

    # -- start --------------------------------------------------------------------------------------------------------

    def register_pool(self, pool: Any) -> None:
        """One tensor for all layers: [blocks, layers, K and V, ...]."""
        if not isinstance(pool, torch.Tensor) or pool.dim() < 3:
            shape = tuple(pool.shape) if isinstance(pool, torch.Tensor) else type(pool).__name__
            self._stay_out(f"the engine's KV pool is {shape}, and not [blocks, layers, K and V, ...]")
            return
        self._register({f"layer {i}": pool[:, i] for i in range(pool.shape[1])}, pool.shape[0])

    def register_layout(self, layout: Any) -> None:
        """Regions of memory, as the engine's second cache manager describes its pools."""
        groups = compat.needed(layout, "groups")
        if len(groups) != 1:
            self._stay_out(f"the model has {len(groups)} groups of layers (hybrid attention), and one is supported")
            return
        if getattr(groups[0], "window_size", None) is not None:
            self._stay_out(f"the model's attention has a sliding window of {groups[0].window_size} tokens")
            return
        regions = [*groups[0].regions, *getattr(groups[0], "replicated_regions", ())]
        self._register({f"region {i}": region.as_tensor() for i, region in enumerate(regions)}, regions[0].num_slots)

    def _register(self, tensors: Mapping[str, Any], num_blocks: int) -> None:
        """Allocate and meet the leader. Raises when that fails: better now than later."""
        if self._channel is not None:
            raise RuntimeError("the engine has registered its KV cache twice; KVBM serves one engine a process")
        if registry.outlives_engine(self._config):
            self._rank.cache = self._describe()
            if self._rank.cache is None and not registry.NEAR.is_wanted(self._config):
                self._stay_out("there is no host tier (DYN_KVBM_CPU_CACHE_GB) beside a disk that cannot be used")
                return
        device = next(iter(tensors.values())).device
        self._cuda = device.type == "cuda"
        self._rank.register(tensors, num_blocks)
        if (leader := find_local(self._config.leader_pub_url)) is not None:
            leader.engine_blocks = num_blocks
        # Before the leader hears of this rank: the hello carries the measured rate of the disk.
        hello = self._rank.open()
        assert hello is not None
        channel = self._meet(hello)
        channel.wait()
        if self._cuda:
            self._forward_ended = torch.cuda.Event()
        channel.confirm()

    def _describe(self) -> Fingerprint | None:
        """What names a cache that outlives this engine; None, with a sentence, when there can be none. The engine has
        loaded its weights before it makes its KV cache, in this process."""
        found = weights.fingerprint_or_warn(weights.digest_of_process, lambda own: self._exchanges.gather(own, WEIGHTS))
        return {**self._setup.cache, "weights": found} if found else None

    def _meet(self, hello: Hello) -> ZmqWorker:
        config = self._config
        timeout = config.leader_worker_init_timeout_secs
        urls = config.leader_pub_url, config.leader_ack_url
        self._channel = ZmqWorker(hello, *urls, timeout, TIMING, read_secret(config))
        return self._channel

    def _stay_out(self, reason: str) -> None:
        logger.warning("KVBM stays out of the way: %s. The engine runs as if it were not configured.", reason)
        self._meet(Hello(self._rank.rank, 0, "", []))  # no slots: the leader learns that there is nothing to agree on

    # -- a step -------------------------------------------------------------------------------------------------------

    def bind(self, metadata: object) -> None:
        """Take in a step's metadata."""
        self._abandon_stores()
        self._step = StepMeta()
        self._step = decode(metadata)
        self._stores_begun = not self._step.plan.stores

    def begin(self, stream: Any) -> None:
        """Before the engine writes anything in this step."""
        behind = self._step.messages - self._received
        self._take(MESSAGE_SECONDS if behind > 0 else 0.0)
        self._begin(self._step.plan.fences, stream)

    def forward_ended(self) -> None:
        """From the engine's callable: the forward pass has been submitted to the current stream."""
        if not (self._cuda and torch.cuda.is_current_stream_capturing()):
            self._called = True
            self._end_forward(None)

    def end(self, stream: Any) -> None:
        """The engine is through with the step. Where it knows no callable, this is the end of the forward pass."""
        if not self._called:
            self._end_forward(stream)
        self._called = False

    def _end_forward(self, stream: Any) -> None:
        with self._on(stream):
            if self._forward_ended is not None:
                self._forward_ended.record()
            if self._stores_begun or self._rank.worker is None:
                return
            self._stores_begun = True
            plan = self._step.plan
            self._stores.update(self._step.owners)
            self._last_store = max(self._last_store, *(store.id for store in plan.stores))
            self._rank.worker.start_stores(plan)

    def _abandon_stores(self) -> None:
        """The forward pass of the last step never ran: report its stores as failed."""
        if not self._stores_begun and self._channel is not None:
            stores = [StoreResult(store.id, ok=False) for store in self._step.plan.stores]
            self._last_store = max(self._last_store, *(store.id for store in stores))
            self._channel.send(Report(self._rank.rank, stores=stores))
        self._stores_begun = True

    def _begin(self, fences: list[int], stream: Any) -> None:
        """Start the received loads, after the engine's submitted work and before its next."""
        loads, self._late = self._late, []
        plan = StepPlan(loads=[load for load in loads if self._may_begin(load)], fences=fences)
        if not plan or self._rank.worker is None:
            return
        with self._on(stream):
            if self._forward_ended is not None:
                torch.cuda.current_stream().wait_event(self._forward_ended)
            self._rank.worker.begin(plan)
            self._rank.worker.start_loads(plan)

    def _may_begin(self, load: LoadPlan) -> bool:
        request = int(load.request)
        if request in self._ended:
            # The engine may have given its blocks to another request.
            self._answer(LoadResult(load.id, list(range(len(load.blocks)))))
            return False
        if load.after and max(load.after) > self._last_store:
            self._late.append(load)
            return False
        self._loads[load.id] = request
        return True

    def _on(self, stream: Any) -> Any:
        return nullcontext() if stream is None or not self._cuda else torch.cuda.stream(stream)

    # -- the end of an iteration --------------------------------------------------------------------------------------

    def poll(self, finished: Sequence[int], started: Sequence[int]) -> tuple[list[int], list[int]]:
        """(requests whose blocks the engine may have back, requests that may be computed now)."""
        self._waiting.update(started)
        for number in started:  # the engine runs a request again whose blocks it had taken back
            self._ended.pop(number, None)
        self._saving.extend(finished)
        self._remember(finished)
        self._take(0.0)
        if self._late:
            self._begin([], None)
        self._report()
        if self._orders:
            self._carry_out_orders()
        leader = find_local(self._config.leader_pub_url)
        if leader is not None:
            leader.end_iteration()
        loaded = sorted(number for number in self._waiting if self._may_go(number))
        self._waiting.difference_update(loaded)
        self._ready.difference_update(loaded)
        return self._saved(), loaded

    def _may_go(self, number: int) -> bool:
        """Whether the engine can schedule the request: its load is over, or the request has ended."""
        return number in self._ready or (number in self._ended and number not in self._loads.values())

    def _remember(self, finished: Sequence[int]) -> None:
        self._ended.update(dict.fromkeys(finished))
        while len(self._ended) > ENDED:
            del self._ended[next(iter(self._ended))]

    def _report(self) -> None:
        """Report ended transfers to the leader."""
        worker = self._rank.worker
        if worker is None or self._channel is None:
            return
        report = worker.poll().report
        for load in report.loads:
            request = self._loads.pop(load.id, None)
            if request is not None and not load.bad and not load.missed:
                self._ready.add(request)
        for store in report.stores:
            self._stores.pop(store.id, None)
        self._channel.send(report)
        self._channel.send(Report(self._rank.rank, faults=self._faults.take()))  # goes only if there are any

    def _saved(self) -> list[int]:
        """The request that has waited longest, once nothing here reads or writes its blocks.

        One at a time and in the engine's order: TensorRT-LLM 1.2 forgets all but the first of those that every rank has
        let go of in one iteration, and with them their blocks.
        """
        if not self._saving:
            return []
        first = self._saving[0]
        if first in self._loads.values() or first in self._stores.values():
            return []
        return [self._saving.popleft()]

    # -- messages -----------------------------------------------------------------------------------------------------

    def _take(self, timeout: float) -> None:
        if self._channel is None:
            return
        for plan in self._channel.receive(timeout):
            self._received += 1
            self._late += plan.loads
            if plan.moves and self._rank.worker is not None:
                self._rank.worker.start_stores(StepPlan(moves=plan.moves))
            for order in plan.recompute:
                if order.agreed:
                    self._orders.pop(order.id, None)
                    self._ready.add(int(order.request))
                else:
                    self._orders[order.id] = order

    def _answer(self, result: LoadResult) -> None:
        if self._channel is not None:
            self._channel.send(Report(self._rank.rank, [result]))

    # -- setting requests back ----------------------------------------------------------------------------------------

    def _carry_out_orders(self) -> None:
        """The leader waits for every rank's answer before any may go on, so there is no hurry."""
        waiting = compat.waiting_requests()
        for order in list(self._orders.values()):
            number = int(order.request)
            if waiting is not None and number not in waiting and number not in self._ended:
                continue  # the engine has not got round to it yet
            del self._orders[order.id]
            done = waiting is not None and number in waiting and self._try_to_set_back(waiting[number], order.position)
            self._answer(LoadResult(order.id, [] if done else [0]))

    def _try_to_set_back(self, request: Any, position: int) -> bool:
        try:
            compat.set_back(request, position)
        except Exception as error:
            self._faults.record("setting a request back", error)
            return False
        return True

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._rank.close()
