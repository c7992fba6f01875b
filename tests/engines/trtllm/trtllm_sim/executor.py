"""One rank's executor: schedule, prepare, forward, sample, respond; the same decisions on every rank.

``overlap`` runs the next forward pass before the last one's tokens are looked at, as the engine does by default: a
request is found to be finished one step late, and has then written one token too many.
"""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from trtllm_sim.api import LlmRequestState as State
from trtllm_sim.blocks import Blocks
from trtllm_sim.comm import Comm
from trtllm_sim.connector import KvCacheConnectorManager
from trtllm_sim.model import Batch, Model, agree
from trtllm_sim.request import LlmRequest, Prompt


@dataclass
class Options:
    """What an engine is started with."""

    ranks: int = 4
    device: str = "cpu"
    generation: str = "1.2"
    blocks: int = 32  # of the pool: far less than the requests want
    layers: int = 3
    block_size: int = 8
    width: int = 16  # bytes of K, and of V, a token and layer
    max_length: int = 160  # tokens of a request
    max_batch: int = 8
    max_tokens: int = 64  # of a step
    overlap: bool = True
    chunked: bool = True
    partial_reuse: bool = False
    cuda_graphs: bool = False  # decode steps are replayed, and no layer's hooks run in them
    pace: tuple[float, float] = (0.0, 0.0)  # seconds that a pass, and a prompt token in it, take longer
    lag: int = 0  # cycles that a pass takes longer on a GPU, so that the CPU is ahead of it as in a real engine
    connector: dict[str, str] | None = None  # kv_connector_config
    layout: bool = False  # describe the pool by regions, as the engine's second cache manager does
    # How often that manager puts off a request that it has asked the connector about, takes less than it was offered,
    # or takes the blocks of a running request back.
    speculate: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    # Of the tests: this rank kills itself when the first load after that iteration is under way.
    kill: tuple[int, int] | None = None
    hang: int | None = None  # this rank stops at its tenth iteration
    load_delay: float | None = None  # seconds of KVBM's injected faults "slow" and "slow-store"
    store_delay: float | None = None
    corrupt: tuple[int, int] | None = None  # (rank, iteration): flip one bit of one byte that is read from then on
    fences: bool = True  # False: blocks are written to whether KVBM still reads them or not


class Executor:
    def __init__(self, options: Options, comm: Comm) -> None:
        self.options = options
        self.comm = comm
        self.model = Model(
            options.blocks, options.layers, options.block_size, options.width, comm.rank, options.device,
            options.max_batch, options.lag,
        )  # fmt: skip
        self.blocks = Blocks(options.blocks, options.block_size, options.partial_reuse, self._copy_block)
        self.manager: KvCacheConnectorManager | None = None
        self.forward_pass_callable: Any = None
        self.iteration = 0
        self.replays = 0
        self.outputs: dict[int, list[int]] = {}
        self._waiting: list[LlmRequest] = []
        self._active: list[LlmRequest] = []
        self._previous: tuple[list[tuple[LlmRequest, bool]], torch.Tensor] | None = None  # a step's results
        self._rows: dict[int, int] = {}  # request -> its row of the last step's output
        self._loads_seen = False
        self._corrupted = False
        self._max_blocks = -(-options.max_length // options.block_size)
        self._graph: Any = None
        self._graph_batch: Batch | None = None

    def _copy_block(self, source: int, target: int) -> None:
        self.model.pool[target].copy_(self.model.pool[source])

    @property
    def stream(self) -> Any:
        return torch.cuda.current_stream() if self.options.device.startswith("cuda") else None

    # -- start --------------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Capture the decode step of a full batch. On a CPU a graph is a call."""
        if not self.options.cuda_graphs:
            return
        rows = self.options.max_batch
        batch = self._graph_batch = Batch(rows, rows, self._max_blocks, self.options.device)
        batch.fill(previous=[-1] * rows, rows=list(range(rows)), last=list(range(rows)))
        batch.tables.fill_(self.model.scratch)
        if self.stream is None:
            self._graph = SimpleNamespace(replay=lambda: self.model.forward(batch))
            return
        side = torch.cuda.Stream()
        side.wait_stream(self.stream)
        with torch.cuda.stream(side):
            self.model.forward(batch)
        side.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.model.forward(batch)

    # -- the loop -----------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return not self._active and not self._waiting and self._previous is None

    @property
    def busy(self) -> bool:
        return not self.idle or (self.manager is not None and self.manager.busy)

    def step(self, prompts: list[Prompt], cancels: set[int]) -> list[int]:
        """One iteration, with the same arguments on every rank. Returns the requests that have ended."""
        self.iteration += 1
        while self.options.hang == self.comm.rank and self.iteration == 10:
            time.sleep(1)
        self._waiting += [LlmRequest(prompt, self.options.generation) for prompt in prompts]
        ended = self._cancel_waiting(cancels)
        context, generation = self._schedule()
        scheduled = bool(context or generation)
        if scheduled:
            self._prepare(context, generation)
            context = self._start_batch(context, generation)
        if context or generation:
            last, self._previous = self._previous, self._forward(context, generation)
            if not self.options.overlap:
                last, self._previous = self._previous, None
        else:
            last, self._previous = self._previous, None
        if last is not None:
            self._sample(*last)
        ended += self._respond(cancels)
        if self.options.speculate:
            self._take_back()
        if self.manager is not None:
            for request in self.manager.get_finished():
                self.blocks.free_sequence(request)
                if request.is_pausing:
                    self._replay_later(request)
        return ended

    def _cancel_waiting(self, cancels: set[int]) -> list[int]:
        gone = [request for request in self._waiting if request.request_id in cancels]
        for request in gone:
            self._waiting.remove(request)
            self.outputs[request.request_id] = []
        return [request.request_id for request in gone]

    def _schedule(self) -> tuple[list[LlmRequest], list[LlmRequest]]:
        options = self.options
        while self._waiting and len(self._active) < options.max_batch:
            reserved = sum(self.blocks.needed(request) for request in self._active)
            if self.blocks.needed(self._waiting[0]) + reserved > self.blocks.free:
                break
            self._active.append(self._waiting.pop(0))
        running = [request for request in self._active if not request.done]
        going = [request for request in running if not request.is_pausing]
        generation = [request for request in going if request.state is State.GENERATION_IN_PROGRESS]
        room = options.max_tokens - len(generation)
        context: list[LlmRequest] = []
        for request in running:
            if request.state is not State.CONTEXT_INIT:
                continue
            chunk = request.context_remaining_length
            if options.chunked and chunk > room:
                chunk = room // options.block_size * options.block_size
            if not chunk or (chunk > room and context):
                break
            request.context_chunk_size = chunk
            room -= chunk
            context.append(request)
        return context, generation

    def _prepare(self, context: list[LlmRequest], generation: list[LlmRequest]) -> None:
        for request in list(context):
            if request.is_first_context_chunk and not self.blocks.has(request):
                chunk = request.context_chunk_size
                self.blocks.add_sequence(request, self._ask)
                request.computed = request.context_current_position
                request.context_chunk_size = self._chunk_after_reuse(request, chunk)
                if self.manager is not None and request.offer is None:
                    self.manager.update_state_after_alloc(request, self.blocks.get_cache_indices(request))
            if request.offer is not None:
                if self._chance("put off", request):
                    context.remove(request)
                else:
                    self._deliver(request)
        for request in generation:
            self.blocks.add_token(request, request.computed + 1)
        if self.manager is not None:
            self.manager.build_scheduler_output(context, generation, self.blocks)

    def _ask(self, request: LlmRequest, computed: int) -> int:
        if self.manager is None:
            return 0
        if not self.options.speculate:
            return self.manager.get_num_new_matched_tokens(request, computed)
        request.offer = self.manager.query(request, computed)
        return request.offer[0]

    def _chance(self, what: str, request: LlmRequest) -> bool:
        """The same on every rank."""
        chance = random.Random(f"{what}/{request.request_id}/{self.iteration}")
        return chance.random() < self.options.speculate

    def _deliver(self, request: LlmRequest) -> None:
        """The second cache manager: the request gets into a batch, with as much of the offer as there is room for."""
        assert self.manager is not None
        assert request.offer is not None
        (tokens, later), request.offer = request.offer, None
        start, size = request.context_current_position - tokens, self.options.block_size
        if tokens and self._chance("less", request):
            taken = random.Random(request.request_id).randrange(0, tokens, size)
            self.manager.cancel_load(request, start + taken, start + tokens)
            tokens = taken
            request.prepopulated_prompt_len = request.context_current_position = request.computed = start + taken
        self.manager.commit(request, tokens, later)
        table = self.blocks.get_cache_indices(request)
        # Room for the first chunk; later chunks bring their blocks with them.
        first = -(-(start + tokens + max(request.context_chunk_size, size)) // size)
        self.manager.update_state_after_alloc(request, table[:first])

    def _take_back(self) -> None:
        """The second cache manager: blocks go to others, and their request is computed again from its start."""
        under_way = [request for request, _ in self._previous[0]] if self._previous is not None else []
        for request in list(self._active):
            if request.is_pausing and request not in under_way:
                self._active.remove(request)
                table = self.blocks.get_cache_indices(request)
                if self.manager is None or not self.manager.request_finished(request, table):
                    self.blocks.free_sequence(request)
                    self._replay_later(request)
            elif request.state is State.GENERATION_IN_PROGRESS and self._chance("take back", request):
                request.is_pausing = True

    def _replay_later(self, request: LlmRequest) -> None:
        request.take_back()
        self._waiting.insert(0, request)

    def _chunk_after_reuse(self, request: LlmRequest, chunk: int) -> int:
        """A chunk that does not end the prompt ends with a block."""
        end = min(request.context_current_position + chunk, request.prompt_len)
        if end < request.prompt_len:
            end = end // self.options.block_size * self.options.block_size
        return end - request.context_current_position

    def _start_batch(self, context: list[LlmRequest], generation: list[LlmRequest]) -> list[LlmRequest]:
        manager = self.manager
        if manager is None:
            return context
        self._loads_seen = self._loads_seen or bool(manager.new_async_requests.loading)
        left = manager.take_pending(context)
        if left or generation or self.options.generation != "1.0":
            manager.handle_metadata()
            manager.worker.start_load_kv(self.stream)
        kill = self.options.kill
        if kill is not None and kill[0] == self.comm.rank and self.iteration >= kill[1] and self._loads_seen:
            os.kill(os.getpid(), signal.SIGKILL)
        return left

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(
        self, context: list[LlmRequest], generation: list[LlmRequest]
    ) -> tuple[list[tuple[LlmRequest, bool]], torch.Tensor]:
        """Submit a step. Returns its requests, each with whether it gets a token, and what the tokens are made of."""
        rows = [*context, *generation]
        tokens: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        previous: list[int] = []
        for row, request in enumerate(context):
            begin, end = request.context_current_position, request.context_current_position + request.context_chunk_size
            tokens += request.tokens[begin:end]
            positions += range(begin, end)
            owners += [row] * (end - begin)
            previous += [-1] * (end - begin)
        for row, request in enumerate(generation, len(context)):
            known = request.computed < len(request.tokens)
            tokens.append(request.tokens[request.computed] if known else 0)
            previous.append(-1 if known else self._rows[request.request_id])
            positions.append(request.computed)
            owners.append(row)
        last = [max(i for i, owner in enumerate(owners) if owner == row) for row in range(len(rows))]
        tables = [self._padded(self.blocks.get_cache_indices(request)) for request in rows]
        lengths = [positions[i] + 1 for i in last]
        self._corrupt_if_asked(tables, [positions[owners.index(row)] for row in range(len(rows))])
        values = {
            "tokens": tokens, "positions": positions, "rows": owners, "previous": previous, "tables": tables,
            "lengths": lengths, "last": last, "adapters": [request.lora_task_id or 0 for request in rows],
        }  # fmt: skip
        each, token = self.options.pace
        time.sleep(each + token * sum(request.context_chunk_size for request in context))
        if self._graph is not None and not context:
            self._replay(values, len(rows))
        else:
            batch = Batch(len(tokens), len(rows), self._max_blocks, self.options.device)
            batch.fill(**values)
            self.model.forward(batch, self._before_layer, self._after_layer)
        if self.forward_pass_callable is not None:
            self.forward_pass_callable()
        if self.manager is not None:
            self.manager.worker.wait_for_save(self.stream)
        self._rows = {request.request_id: row for row, request in enumerate(rows)}
        for request in context:
            request.context_current_position += request.context_chunk_size
            request.computed = request.context_current_position
            if request.computed == request.prompt_len:
                request.state = State.GENERATION_IN_PROGRESS
                self.blocks.keep_for_reuse(request, request.tokens)
        for request in generation:
            request.computed += 1
        yields = [(request, request.state is State.GENERATION_IN_PROGRESS) for request in rows]
        return yields, self.model.values[: len(rows)].clone()

    def _replay(self, values: dict[str, list], rows: int) -> None:
        assert self._graph_batch is not None
        idle = self.options.max_batch - rows
        full = {**values, "positions": values["positions"] + [0] * idle, "rows": list(range(rows + idle))}
        full["tables"] = values["tables"] + [[self.model.scratch] * self._max_blocks] * idle
        full["previous"] = values["previous"] + [-1] * idle
        full["last"] = list(range(rows + idle))
        self._graph_batch.fill(**full)
        self._graph.replay()
        self.replays += 1

    def _padded(self, table: list[int]) -> list[int]:
        return table + [self.model.scratch] * (self._max_blocks - len(table))

    def _before_layer(self, layer: int) -> None:
        if self.manager is not None:
            self.manager.worker.wait_for_layer_load(layer, self.stream)

    def _after_layer(self, layer: int) -> None:
        if self.manager is not None:
            self.manager.worker.save_kv_layer(layer, self.stream)

    def _corrupt_if_asked(self, tables: list[list[int]], begins: list[int]) -> None:
        """The control of every comparison: one bit of KV that this step is going to read."""
        corrupt = self.options.corrupt
        if corrupt is None or self._corrupted or corrupt[0] != self.comm.rank or self.iteration < corrupt[1]:
            return
        for table, begin in zip(tables, begins, strict=True):
            if begin:
                self.model.pool[table[0], -1, 1, 0] ^= 1
                self._corrupted = True
                return

    # -- results ------------------------------------------------------------------------------------------------------

    def _sample(self, requests: list[tuple[LlmRequest, bool]], values: torch.Tensor) -> None:
        tokens = agree(self.comm.allgather(values.tolist()))
        for (request, yields), token in zip(requests, tokens, strict=True):
            if request.done or not yields:
                continue  # it ended a step ago, or its prompt is not through yet
            request.tokens.append(token)
            generated = len(request.tokens) - request.asked
            request.done = generated == request.max_new_tokens or token % 29 == 0

    def _respond(self, cancels: set[int]) -> list[int]:
        for request in self._active:
            if request.request_id in cancels:
                request.done = request.cancelled = True
        # With overlapping steps, one that is under way may still hold a request that has ended.
        ended = [request for request in self._active if request.done]
        for request in ended:
            self._active.remove(request)
            request.is_pausing = False
            self.outputs[request.request_id] = request.tokens[request.asked :]
            self._terminate(request)
        return [request.request_id for request in ended]

    def _terminate(self, request: LlmRequest) -> None:
        if not self.blocks.has(request):
            return
        if request.offer is not None and self.manager is not None:
            end, tokens, request.offer = request.context_current_position, request.offer[0], None
            self.manager.cancel_load(request, end - tokens, end)
        elif request.state is not State.DISAGG_GENERATION_TRANS_IN_PROGRESS:
            in_context = request.state is State.CONTEXT_INIT
            known = request.context_current_position if in_context else min(request.computed, len(request.tokens))
            self.blocks.keep_for_reuse(request, request.tokens[:known])
        table = self.blocks.get_cache_indices(request)
        if self.manager is None or not self.manager.request_finished(request, table):
            self.blocks.free_sequence(request)
