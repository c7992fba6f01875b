"""``DynamoKVBMConnectorLeader`` and ``DynamoKVBMConnectorWorker``: the classes TensorRT-LLM is pointed at.

They only forward and guard. The engine makes both at the same time, in two threads; they meet through the channel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvbm import config as settings
from kvbm import tracing as nvtx
from kvbm.engines.guard import Faults, guarded
from kvbm.engines.trtllm import compat
from kvbm.engines.trtllm.exchanges import Exchanges
from kvbm.engines.trtllm.leader import LeaderAdapter
from kvbm.engines.trtllm.step import encode
from kvbm.engines.trtllm.worker import WorkerAdapter
from kvbm.runtime.channel import ChannelError, local
from kvbm.tracing import annotate

logger = logging.getLogger("kvbm")


def _read(llm_args: Any) -> tuple[settings.Config, compat.Setup]:
    config = settings.load()
    settings.require_tier(config)
    nvtx.switch(config.nvtx)
    setup = compat.read_setup(llm_args)
    if setup.unsupported is None:
        # Here and not at the first socket: leader and workers see the same directory, so all of them stay out.
        try:
            for path in filter(None, map(local.path_of, (config.leader_pub_url, config.leader_ack_url))):
                local.prepare(path)
        except ChannelError as error:
            setup = setup._replace(unsupported=str(error))
    return config, setup


class DynamoKVBMConnectorLeader(compat.SchedulerBase):  # type: ignore[misc]
    """KVBM in TensorRT-LLM's scheduler, on rank 0. Named by ``connector_scheduler_class``."""

    # Without this flag the engine does not start. KVBM serves no such engine, and stays out of its way.
    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._faults = Faults()
        self._adapter: LeaderAdapter | None = None
        config, setup = _read(llm_args)
        for warning in config.warnings:
            logger.warning("%s", warning)
        for name, reason in config.unused_because.items():
            logger.info("%s is set but not used: %s", name, reason)
        if setup.unsupported is not None:
            logger.warning(
                "KVBM stays out of the way: %s. TensorRT-LLM runs as if it were not configured.", setup.unsupported
            )
            return
        self._adapter = LeaderAdapter(config, setup, self._faults)

    @annotate("wait_for_initialization")
    def wait_for_initialization(self) -> None:
        if self._adapter is not None:
            self._adapter.wait()

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._adapter.match(request, num_computed_tokens)

    @guarded(None)
    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        self._adapter.allocated(request, block_ids)

    @guarded(b"")
    def build_connector_meta(self, scheduler_output: Any) -> bytes:
        return encode(self._adapter.plan_step(scheduler_output))

    @guarded(False, failed=True)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """True in doubt: the workers know themselves when they are through with the blocks."""
        return self._adapter.finished(request)

    # With several groups of layers the engine calls these two, and refuses connectors without them at its start. KVBM
    # serves one group, and stays out of the way of the others.

    def update_state_after_alloc_by_layer_group(self, request: Any, block_ids: list[list[int]]) -> None:
        if len(block_ids) == 1:
            self.update_state_after_alloc(request, block_ids[0])

    def request_finished_by_layer_group(self, request: Any, block_ids: list[list[int]]) -> bool:
        return bool(self.request_finished(request, block_ids[0] if len(block_ids) == 1 else []))

    @guarded(None)
    def request_reset(self, request: Any) -> None:
        """The engine has taken the request's blocks away and will bring it again as a new one."""
        self._adapter.finished(request)

    @guarded(None)
    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """The engine takes nothing of what was offered for these tokens."""
        self._adapter.cancelled(request, start)

    def shutdown(self) -> None:
        if self._adapter is not None:
            self._adapter.close()


class DynamoKVBMConnectorWorker(compat.WorkerBase):  # type: ignore[misc]
    """KVBM on one rank of TensorRT-LLM. Named by ``connector_worker_class``."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._faults = Faults()
        self._adapter: WorkerAdapter | None = None
        config, setup = _read(llm_args)
        self._exchanges = Exchanges(config, setup.ranks)
        if setup.unsupported is not None:
            logger.warning("rank %d: KVBM stays out of the way: %s", setup.rank, setup.unsupported)
            return
        self._adapter = WorkerAdapter(config, setup, self._faults, self._exchanges)

    def register_forward_pass_callable(self) -> Callable[[], None]:
        """Runs at the end of every forward pass, replayed from a CUDA graph or not, on the stream it is computed on."""
        return self._forward_ended

    @guarded(None)
    def _forward_ended(self) -> None:
        self._adapter.forward_ended()

    @annotate("register_kv_caches")
    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        with self._exchanges:
            if self._adapter is not None:
                self._adapter.register_pool(kv_cache_tensor)

    @annotate("register_kv_cache_layout")
    def register_kv_cache_layout(self, layout: Any) -> None:
        with self._exchanges:
            if self._adapter is not None:
                self._adapter.register_layout(layout)

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        self._bind(metadata)

    @guarded(None)
    def _bind(self, metadata: object) -> None:
        self._adapter.bind(metadata)

    @guarded(None)
    def start_load_kv(self, stream: Any) -> None:
        self._adapter.begin(stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Nothing: a request is in no batch before all its blocks are there."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Nothing: blocks are copied out once, when the forward pass is done, not in pieces behind every layer."""

    @guarded(None)
    def wait_for_save(self, stream: Any) -> None:
        self._adapter.end(stream)

    @guarded(lambda: ([], []))
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return self._adapter.poll(finished_gen_req_ids, started_loading_req_ids)

    def shutdown(self) -> None:
        if self._adapter is not None:
            self._adapter.close()
