"""What begins ahead of its step.

Where vLLM runs its scheduler and its only worker in one thread, the scheduler's adapter reaches that worker several
milliseconds before the step's metadata does. It uses them twice: the blocks of a long prompt are fetched while vLLM is
still making room for them, and a load begins as soon as it has been planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvbm.core.cost import Decision
from kvbm.core.keys import Key
from kvbm.core.match import Match
from kvbm.engines.guard import Faults
from kvbm.engines.vllm import compat
from kvbm.engines.vllm.keys import RequestKeys
from kvbm.engines.vllm.request import RequestState
from kvbm.engines.vllm.worker import WorkerAdapter
from kvbm.gil import short_turns
from kvbm.plans import LoadPlan
from kvbm.runtime.leader import Leader

# Shorter prompts gain nothing from being fetched early: their load is over before the engine gets to the second layer.
PREFETCH_BLOCKS = 64


class Prefetcher:
    """Fetches one prompt at a time, for a load that comes layer by layer, and holds its slots until that load.

    ``decide``: how much of a match a request would load. ``on_device``: whether vLLM itself still has a block.
    """

    def __init__(
        self,
        leader: Leader,
        worker: WorkerAdapter,
        keys: RequestKeys,
        block_size: int,
        decide: Callable[[Any, Match], Decision],
        on_device: Callable[[Key], bool],
        faults: Faults,
    ) -> None:
        self._manager = leader.manager
        self._worker = worker
        self._keys = keys
        self._block_size = block_size
        self._decide = decide
        self._on_device = on_device
        self._faults = faults
        self._fetched: Match | None = None
        self._fetched_for = ""
        self._step_loads = False  # whether the last step that was planned waits for loads

    def arrived(self, request: Any, alone: bool) -> None:
        """Fetch a new request's blocks. Not beside requests that decode: they would notice, and the bus is free often
        enough. But where all wait for loads already, this one fills the gap until the next step."""
        if alone or self._step_loads:
            self._fetch(request)

    def step_planned(self, loads: Sequence[LoadPlan], line: Iterable[RequestState]) -> None:
        """This step's loads keep the bus busy until it ends; the first request in line fills the gap after it."""
        self._step_loads = any(load.layered and load.in_step for load in loads)
        if self._step_loads and all(load.in_step for load in loads):
            for state in line:
                self._fetch(state.request)
                return

    def load_planned(self, plan: LoadPlan) -> None:
        """Begin a load now if that gains time. A prefetch ends here: the load takes it over, or it is for another."""
        if self._fetched_is_for(plan.request) or (plan.layered and plan.in_step):
            try:
                self._worker.start_early(plan)
            except Exception as error:
                self._faults.record("starting a load early", error)  # the step starts it then
        self.let_go()

    def not_loaded(self, request_id: str) -> None:
        """vLLM has admitted this request without a load, or has finished it."""
        if self._fetched_is_for(request_id):
            self.let_go()

    def let_go(self) -> None:
        """Release the prefetched slots: their load has begun, or will not come."""
        fetched, self._fetched = self._fetched, None
        if fetched is None:
            return
        try:
            self._worker.end_prefetch()
        finally:
            self._manager.release(fetched)

    def _fetched_is_for(self, request_id: str) -> bool:
        return self._fetched is not None and self._fetched_for == request_id

    @short_turns()
    def _fetch(self, request: Any) -> None:
        """Begin to bring a prompt's blocks near while vLLM is still making room for them, which takes milliseconds."""
        limit = (request.num_tokens - 1) // self._block_size
        if self._fetched is not None or limit < PREFETCH_BLOCKS or compat.needs_every_token(request):
            return
        keys = self._keys.of(request)
        if not keys or self._on_device(keys[0]):
            return
        found = self._manager.lookup(keys, 0, limit)
        if len(found.runs) != 1 or found.runs[0].tier != self._manager.near_tier:
            return  # the slots of other tiers are not in host memory
        if found.blocks < PREFETCH_BLOCKS or found.pending:
            return
        if self._decide(request, found).blocks < found.blocks:
            return
        if self._worker.prefetch(found.runs[0].slots, request.num_tokens - found.blocks * self._block_size):
            self._manager.hold(found)
            self._fetched, self._fetched_for = found, request.request_id
