"""vLLM's own scheduler and KVBM's connector over a model made of clockwork, whose every number can be checked.

The KV of a token is made of the token and of the KV before it, as it is read from the cache; the next token is made of
the last KV. So the right answer to a prompt is known without an engine, a block with anything else in it shows in the
answer, and what KVBM has kept can be compared with what it should hold, block by block. Steps overlap as in an engine
with asynchronous scheduling: the next one is scheduled, and carried out, before the scheduler hears of the one before.

Layers may be in several groups, each of which sees all tokens or a window of them, or keeps a state, in the same
memory: as in vLLM. A state is the KV of the last token. It is in the block of that token, and a step that ends in
another block takes it along.
"""

from __future__ import annotations

import copy
import ctypes
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvbm.core.keys import in_group
from kvbm.engines.vllm import compat
from kvbm.engines.vllm.groups import STATE
from kvbm.plans import StepPlan
from kvbm.vllm_integration.connector import DynamoConnector
from tiernames import DISK, HOST

BLOCK = 4
LAYERS = ("layer.0", "layer.1", "layer.2")  # of every group
_HASH = get_hash_fn_by_name("sha256")
init_none_hash(_HASH)
hash_blocks = get_request_block_hasher(BLOCK, _HASH)


def kv(before: int, token: int) -> int:
    return (before * 6364136223846793005 + token * 1442695040888963407 + 1013904223) & (2**62 - 1)


def next_token(last: int) -> int:
    return 10 + (last >> 20) % 1000


def kv_of(tokens: list[int]) -> list[int]:
    found, last = [], 0
    for token in tokens:
        last = kv(last, token)
        found.append(last)
    return found


def answer_to(prompt: list[int], count: int) -> list[int]:
    """What the model says, from first principles."""
    last, answer = kv_of(prompt)[-1], []
    for _ in range(count):
        answer.append(next_token(last))
        last = kv(last, answer[-1])
    return answer


def make_request(name: str, prompt: list[int], max_tokens: int = 8, **options: Any) -> Request:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        block_hasher=hash_blocks,
        **options,
    )


def make_cache(windows: Sequence[int], blocks: int) -> KVCacheConfig:
    """One group of layers for each window; 0 is none, STATE is for layers that keep a state."""
    numbers = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = []
    for group, window in enumerate(windows):
        if window == STATE:
            page = FullAttentionSpec(**numbers).page_size_bytes
            state = {"shapes": ((1,),), "dtypes": (torch.int64,), "page_size_padded": page}
            spec = MambaSpec(block_size=BLOCK, **state, mamba_cache_mode="align")
        else:
            spec = SlidingWindowSpec(**numbers, sliding_window=window) if window else FullAttentionSpec(**numbers)
        groups.append(KVCacheGroupSpec([f"{name}.{group}" for name in LAYERS], spec))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_config(model: str, kvbm: dict[str, Any] | None, **options: Any) -> VllmConfig:
    arguments = {"max_model_len": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8, "enforce_eager": True}
    transfer = None
    if kvbm is not None:
        transfer = KVTransferConfig(
            kv_connector="DynamoConnector",
            kv_connector_module_path="kvbm.vllm_integration.connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=kvbm,
        )
    config = EngineArgs(
        model=model, dtype="float32", kv_transfer_config=transfer, **{**arguments, **options}
    ).create_engine_config()
    config.cache_config.block_size = BLOCK
    return config


class Weights(torch.nn.Module):
    """Stands for the loaded model, whose numbers name a cache that outlives the engine. Its layer registers itself with
    the configuration, as vLLM's attention does."""

    def __init__(self, config: VllmConfig, value: float = 1.0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        for parameter in self.parameters():
            parameter.data.fill_(value)
        config.compilation_config.static_forward_context["layer"] = self.layer


def meet(connector: Any) -> Any:
    """As vLLM does at the end of its start, with the one connector of a worker's process."""
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    try:
        return connector.get_handshake_metadata()
    finally:
        kv_transfer_state._KV_CONNECTOR_AGENT = None


class Rank:
    """One worker: its share of the cache, KVBM's worker adapter, and the model runner's view of the requests."""

    def __init__(self, config: VllmConfig, cache: KVCacheConfig, windows: Sequence[int], rank: int) -> None:
        config = copy.copy(config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        self.rank = rank
        self.windows = windows
        memory = [torch.full((cache.num_blocks, BLOCK), -1, dtype=torch.int64) for _ in LAYERS]
        self.groups = [dict(zip(group.layer_names, memory, strict=True)) for group in cache.kv_cache_groups]
        self.connector = DynamoConnector(config, KVConnectorRole.WORKER, cache)
        registered = {}
        for window, layers in zip(windows, self.groups, strict=True):
            # A state is smaller than the block that vLLM gives it.
            registered |= {n: t.view(torch.int8)[:, :8] if window == STATE else t for n, t in layers.items()}
        self.connector.register_kv_caches(registered)
        self.clears_early = False
        self.tokens: dict[str, list[int]] = {}
        self.prompts: dict[str, int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.plan: StepPlan | None = None  # of the last step

    @property
    def blocks(self) -> dict[str, list[int]]:
        """The tables of the first group."""
        return {name: tables[0] for name, tables in self.tables.items()}

    def disguise(self, group: int, layer: int, value: int) -> int:
        """No two layers and no two ranks hold the same numbers."""
        return value ^ (group * 0x777700000000 + layer * 0x5555 + self.rank * 0xAAAA0000)

    def execute(self, output: Any) -> ModelRunnerOutput:
        connector, meta = self.connector, output.kv_connector_metadata
        if self.clears_early:
            self._clear(output)
        connector.handle_preemptions(meta)
        if not self.clears_early:
            self._clear(output)
        self._update(output)
        connector.bind_connector_metadata(meta)
        self.plan = connector._plan
        in_step = getattr(output, "has_sync_kv_loads", True)
        if in_step:
            connector.start_load_kv(None)
        sampled = {name: self._forward(name, *work) for name, work in self._work(output).items()}
        if not in_step:
            connector.start_load_kv(None)
        connector.wait_for_save()
        transfers = KVConnectorOutput(
            **self._finished(output.finished_req_ids),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        connector.clear_connector_metadata()
        names = list(sampled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=transfers,
        )

    def _clear(self, output: Any) -> None:
        for block in getattr(output, "new_block_ids_to_zero", None) or ():
            for layer in self.groups[0].values():
                layer[block] = 0

    def _finished(self, names: set[str]) -> dict[str, Any]:
        if not compat.fails_whole_requests():
            return {"finished_recving": self.connector.get_finished(names)[1]}
        results = self.connector.get_transfer_results(names)
        return {"finished_recving": results.finished_recving, "failed_recving": results.failed_recving}

    def _update(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.tokens.pop(name, None)
            self.tables.pop(name, None)
        for new in output.scheduled_new_reqs:
            self.prompts[new.req_id] = len(new.prompt_token_ids)
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.tables[new.req_id] = [list(table) for table in new.block_ids]
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            # As vLLM's runner: tokens that the scheduler has thrown away are forgotten here too.
            del self.tokens[name][self.prompts[name] + cached.num_output_tokens[i] :]
            if name in cached.resumed_req_ids:
                self.tokens[name] = list(cached.all_token_ids.get(name, self.tokens[name]))
                self.tables[name] = [[] for _ in self.groups]
            for table, fresh in zip(self.tables[name], cached.new_block_ids[i] or (), strict=False):
                table += fresh

    def _work(self, output: Any) -> dict[str, tuple[int, int]]:
        """Request -> (first position, number of tokens)."""
        first = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        first.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return {name: (first[name], count) for name, count in output.num_scheduled_tokens.items()}

    def _forward(self, name: str, first: int, count: int) -> list[int]:
        tokens = self.tokens[name]
        right = [0, *kv_of(tokens[: first + count])]
        last = strays = 0
        for group, layers in enumerate(self.groups):
            table, window = self.tables[name][group], self.windows[group]
            begin = max(0, first - window + 1) if window else 0
            for layer, (layer_name, cache) in enumerate(layers.items()):
                self.connector.wait_for_layer_load(layer_name)
                if window == STATE:
                    last = self.disguise(group, layer, int(cache[table[(first - 1) // BLOCK], 0])) if first else 0
                    for token in tokens[first : first + count]:
                        last = kv(last, token)
                    cache[table[(first + count - 1) // BLOCK], 0] = self.disguise(group, layer, last)
                    strays += last != right[-1]
                    continue
                # Attention reads all that it sees; whatever is wrong there is carried on.
                last = right[begin]
                for position in range(begin, first + count):
                    block, offset = table[position // BLOCK], position % BLOCK
                    if position >= first:
                        cache[block, offset] = self.disguise(group, layer, kv(last, tokens[position]))
                    read = self.disguise(group, layer, int(cache[block, offset]))
                    # What was read counts if it follows from what was read before it; else it poisons the rest.
                    last = read if read == kv(last, tokens[position]) else (read * 31 + last + 1) & (2**62 - 1)
                strays += last != right[-1]
        if first + count < len(tokens):
            return []
        tokens.append(next_token(last + (strays << 30)))
        return [tokens[-1]]

    def kept(self, slot: int, group: int) -> list[list[int]]:
        """What KVBM's slab holds in a slot, of a block of this group, a list a layer."""
        slab = self.connector._adapter._rank._slab
        return self._read(ctypes.string_at(slab.address + slot * slab.slot_bytes, slab.slot_bytes), group)

    def kept_on_disk(self, slot: int, group: int) -> list[list[int]]:
        file = self.connector._adapter._rank._stores()[DISK]
        with open(file.path, "rb") as slots:
            slots.seek(slot * file.slot_bytes)
            return self._read(slots.read(file.slot_bytes), group)

    def _read(self, content: bytes, group: int) -> list[list[int]]:
        found = []
        for segment in self.connector._adapter._rank.layout.segments:
            raw = content[segment.offset : segment.offset + segment.size]
            numbers = torch.frombuffer(bytearray(raw), dtype=torch.int64).tolist()
            found.append([self.disguise(group, segment.layer, number) for number in numbers])
        return found


class Clockwork:
    """The engine: add requests, turn the crank, look at the answers."""

    def __init__(
        self,
        model: str,
        kvbm: dict[str, Any],
        blocks: int = 64,
        ranks: int = 1,
        overlap: bool = True,
        second_runner: bool = False,
        windows: Sequence[int] = (0,),
        **options: Any,
    ) -> None:
        config = make_config(model, {"cpu_cache_override_num_blocks": 200, **kvbm}, **options)
        config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = ranks
        config.scheduler_config.async_scheduling = overlap
        config.cache_config.num_gpu_blocks = blocks
        if STATE in windows:
            config.cache_config.mamba_cache_mode, config.cache_config.mamba_block_size = "align", BLOCK
        cache = make_cache(windows, blocks)
        if "disk_cache_override_num_blocks" in kvbm or "host_persist" in kvbm:
            self.weights = Weights(config)
        self._windows = windows
        self.ranks = [Rank(config, cache, windows, rank) for rank in range(ranks)]
        kind = AsyncScheduler if overlap else Scheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        # The second model runner gets requests that come back from preemption as new ones.
        self.scheduler.use_v2_model_runner = second_runner
        self.scheduler.connector._adapter._clears_before_fences = second_runner
        for rank in self.ranks:
            rank.clears_early = second_runner
        hellos = {(0, rank.rank): meet(rank.connector) for rank in self.ranks}
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(hellos)
        self._aggregator = KVOutputAggregator(ranks)
        self._depth = 2 if overlap else 1
        self._queue: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._wanted: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self._requests: list[Request] = []
        self.disk_lies = "disk-torn" in kvbm.get("inject_faults", "")
        self.steps = 0

    # -- working ------------------------------------------------------------------------------------------------------

    def add(self, name: str, prompt: list[int], max_tokens: int = 8, **options: Any) -> Request:
        request = make_request(name, prompt, max_tokens, **options)
        self._wanted[name] = answer_to(prompt, max_tokens)
        self._requests.append(request)
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._wanted.pop(name, None)

    def submit(self) -> Any:
        """Schedule a step and carry it out; its outcome waits in the queue."""
        output = self.scheduler.schedule()
        outcomes = [rank.execute(output) for rank in self.ranks]
        outcome = self._aggregator.aggregate(outcomes) if len(outcomes) > 1 else outcomes[0]
        self._queue.append((output, outcome))
        self.steps += 1
        return output

    def process(self) -> None:
        """Tell the scheduler what became of the oldest step."""
        output, outcome = self._queue.popleft()
        results = self.scheduler.update_from_output(output, outcome)
        for outputs in results.values():
            for result in outputs.outputs:
                self.answers.setdefault(result.request_id, []).extend(result.new_token_ids)
                assert str(result.finish_reason) != "error", result

    @property
    def can_submit(self) -> bool:
        return len(self._queue) < self._depth and self.scheduler.has_requests()

    def turn(self) -> None:
        """One turn of vLLM's loop: keep the queue full, else take from it."""
        if self.can_submit:
            output = self.submit()
            if len(self._queue) < self._depth and (output.num_scheduled_tokens or self.scheduler.has_requests()):
                return
        if self._queue:
            self.process()

    def run(self, seconds: float = 120) -> None:
        """Until every request has its answer and every store has ended. The limit is a time: on a busy machine the
        threads that copy may take as long as thousands of steps without a token."""
        limit = time.monotonic() + seconds
        while self._queue or self.scheduler.has_requests():
            if time.monotonic() > limit:
                raise TimeoutError(f"still busy after {seconds} s: {list(self.scheduler.requests)}")
            self.turn()

    def forget(self) -> None:
        """vLLM's own prefix cache is emptied; KVBM's is not."""
        assert self.scheduler.reset_prefix_cache()

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def adapter(self) -> Any:
        return self.scheduler.connector._adapter

    @property
    def pool(self) -> Any:
        return self.adapter.leader.manager.catalogs[HOST]

    @property
    def counts(self) -> Any:
        return self.adapter.session.counts

    @property
    def onboarded(self) -> int:
        return self.counts.onboarded_blocks.get(HOST, 0)

    def check(self) -> None:
        """Every answer is right, and so is every block that could be found."""
        for name, wanted in self._wanted.items():
            assert self.answers.get(name) == wanted, name
        self.check_pool()

    def check_pool(self) -> None:
        """What can be found under a key is the KV of the tokens it stands for, on every rank and layer."""
        known: dict[bytes, tuple[list[int], int]] = {}
        for request in self._requests:
            values = kv_of(list(request.all_token_ids))
            for group, window in enumerate(self._windows):
                names = request.block_hashes
                if self.adapter._groups.apart:
                    names = in_group(names, group)
                for i, name in enumerate(names):
                    end = (i + 1) * BLOCK
                    known[name] = values[end - 1 if window == STATE else i * BLOCK : end], group
        for tier, pool in self.adapter.leader.manager.catalogs.items():
            if tier == DISK and self.disk_lies:
                continue  # it claims to have written what it has not: nobody can know before it is read
            for key in pool.findable:
                slot = pool.find(key)
                values, group = known[key]
                for rank in self.ranks:
                    for layer in (rank.kept if tier == HOST else rank.kept_on_disk)(slot, group):
                        assert layer[: len(values)] == values, (
                            f"{tier} slot {slot} of rank {rank.rank} holds the wrong KV"
                        )

    def check_idle(self) -> None:
        leader = self.adapter.leader
        assert not leader.busy
        assert not self.adapter._requests
        for pool in leader.manager.catalogs.values():
            assert (pool.pinned, pool.writing, pool.lent) == (0, 0, 0)
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == self.scheduler.kv_cache_config.num_blocks - 1

    def close(self, workers_first: bool = False) -> None:
        """``workers_first``: in the order of vLLM's EngineCore."""
        if self.scheduler is not None:
            connectors = [self.scheduler.connector, *(rank.connector for rank in self.ranks)]
            for connector in (*connectors[1:], connectors[0]) if workers_first else connectors:
                connector.shutdown()
            self.scheduler = None
