"""What the engine keeps of loads and saves that are under way, and how it asks the connector.

The scheduler lives on rank 0; what it says is broadcast. A load or a save is over when every rank has said so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtllm_sim import api
from trtllm_sim.api import LlmRequestState as State
from trtllm_sim.comm import Comm
from trtllm_sim.request import LlmRequest


class AsyncRequests:
    def __init__(self) -> None:
        self.saving: dict[int, LlmRequest] = {}
        self.loading: dict[int, LlmRequest] = {}

    def take(self, other: AsyncRequests, saving: Any, loading: Any) -> None:
        for number in list(saving):
            self.saving[number] = other.saving.pop(number)
        for number in list(loading):
            self.loading[number] = other.loading.pop(number)

    def __bool__(self) -> bool:
        return bool(self.saving or self.loading)


class KvCacheConnectorManager:
    def __init__(self, comm: Comm, worker: Any, scheduler: Any, generation: str) -> None:
        self.worker = worker
        self.scheduler = scheduler
        self.new_async_requests = AsyncRequests()
        self.pending_async_requests = AsyncRequests()
        self.local_finished_async_requests = AsyncRequests()
        self.finished_async_loading_requests: dict[int, LlmRequest] = {}
        self.onboarded: set[int] = set()
        self._comm = comm
        self._data = api.request_data(generation)
        self._external: dict[int, int] = {}
        self._seen: dict[int, tuple[int, int]] = {}  # request -> tokens and blocks that were told of already
        self._output: api.SchedulerOutput | None = None

    def _on_leader(self, ask: Callable[[], Any]) -> Any:
        return self._comm.broadcast(ask() if self.scheduler is not None else None)

    # -- start of an iteration ----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: LlmRequest, computed: int) -> int:
        tokens, later = self.query(request, computed)
        self.commit(request, tokens, later)
        return tokens

    def query(self, request: LlmRequest, computed: int) -> tuple[int, bool]:
        """What the connector offers. Once for an allocation, whatever becomes of the offer."""
        tokens, later = self._on_leader(lambda: self.scheduler.get_num_new_matched_tokens(request, computed))
        if later and not tokens:
            raise RuntimeError("load_kv_async must be False when num_tokens is 0!")
        return tokens, later

    def commit(self, request: LlmRequest, tokens: int, later: bool) -> None:
        """The engine takes so many tokens, maybe none; a request that was to wait for a load waits all the same."""
        if later:
            self.new_async_requests.loading[request.request_id] = request
            self.onboarded.add(request.request_id)
        self._external[request.request_id] = tokens

    def cancel_load(self, request: LlmRequest, start: int, end: int) -> None:
        if self.scheduler is not None:
            self.scheduler.cancel_load(request, start, end)

    def update_state_after_alloc(self, request: LlmRequest, blocks: list[int]) -> None:
        if self.scheduler is not None:
            self.scheduler.update_state_after_alloc(request, list(blocks))

    def build_scheduler_output(self, context: list[LlmRequest], generation: list[LlmRequest], blocks: Any) -> None:
        output = api.SchedulerOutput()
        for request in context:
            if request.request_id not in self.new_async_requests.loading:
                is_new = request.request_id not in self._seen
                data = self._request_data(request, blocks)
                data.computed_position -= self._external.get(request.request_id, 0)
                (output.new_requests if is_new else output.cached_requests).append(data)
        output.cached_requests += [self._request_data(request, blocks) for request in generation]
        self._external.clear()
        self._output = output

    def _request_data(self, request: LlmRequest, blocks: Any) -> Any:
        table, tokens = blocks.get_cache_indices(request), request.get_tokens(0)
        old_tokens, old_blocks = self._seen.get(request.request_id, (0, 0))
        self._seen[request.request_id] = len(tokens), len(table)
        if request.state is State.CONTEXT_INIT:
            computed = request.context_current_position
            scheduled = min(request.context_remaining_length, request.context_chunk_size)
        else:
            computed, scheduled = len(tokens) - 1, 1
        data = self._data(request.request_id, tokens[old_tokens:], table[old_blocks:], computed, scheduled)
        if isinstance(data, api.NewRequestData):
            data.block_hashes = [hash(tuple(tokens[: i + blocks.size])) for i in range(0, len(tokens), blocks.size)]
            data.cache_salt = request.prompt.salt
            if request.prompt.priority is not None:
                data.priorities = [request.prompt.priority] * len(data.new_block_ids)
        return data

    def take_pending(self, context: list[LlmRequest]) -> list[LlmRequest]:
        """Those of the batch that do not wait for a load."""
        for request in context:
            if request.request_id in self.new_async_requests.loading:
                request.state = State.DISAGG_GENERATION_TRANS_IN_PROGRESS
        return [request for request in context if request.state is State.CONTEXT_INIT]

    def handle_metadata(self) -> None:
        output, self._output = self._output, None
        metadata = self._on_leader(lambda: self.scheduler.build_connector_meta(output))
        self.worker.bind_connector_meta(metadata)

    def should_add_sequence(self, request: LlmRequest) -> bool:
        return request.request_id not in self.finished_async_loading_requests

    # -- end of an iteration ------------------------------------------------------------------------------------------

    def request_finished(self, request: LlmRequest, blocks: list[int]) -> bool:
        self.finished_async_loading_requests.pop(request.request_id, None)
        self._seen.pop(request.request_id, None)
        saving = self._on_leader(lambda: self.scheduler.request_finished(request, list(blocks)))
        if saving:
            self.new_async_requests.saving[request.request_id] = request
            request.state = State.DISAGG_CONTEXT_TRANS_IN_PROGRESS
        return bool(saving)

    def get_finished(self) -> list[LlmRequest]:
        """Requests whose blocks may be freed. Those that have finished loading become schedulable."""
        started, ended = list(self.new_async_requests.loading), list(self.new_async_requests.saving)
        self.pending_async_requests.take(self.new_async_requests, ended, started)
        saved, loaded = self.worker.get_finished(ended, started)
        self.local_finished_async_requests.take(self.pending_async_requests, saved, loaded)
        mine = self.local_finished_async_requests
        everywhere = self._comm.allgather((set(mine.saving), set(mine.loading))).values()
        saved, loaded = (set.intersection(*sets) for sets in zip(*everywhere, strict=True))
        finished = AsyncRequests()
        finished.take(mine, saved, loaded)
        for number, request in finished.loading.items():
            if not request.done:
                request.state = State.CONTEXT_INIT
                self.finished_async_loading_requests[number] = request
        return list(finished.saving.values())

    @property
    def busy(self) -> bool:
        return bool(self.new_async_requests or self.pending_async_requests or self.local_finished_async_requests)
