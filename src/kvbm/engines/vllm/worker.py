"""The worker's half: registers this rank's KV tensors and carries out the leader's plans on them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvbm.config import Config, slots_for
from kvbm.plans import Hello, StepPlan, Tier
from kvbm.runtime.worker import Outcome, Worker
from kvbm.storage.host import HostSlab
from kvbm.storage.layout import LayoutError, TensorSpec, describe
from kvbm.transfer import open_copier

logger = logging.getLogger("kvbm")


class WorkerHalf:
    """Called by the connector from vLLM's worker thread, in the order of :mod:`kvbm.transfer.base`."""

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = config
        parallel = vllm_config.parallel_config
        self.ranks = parallel.world_size
        self.rank = parallel.rank % self.ranks
        self._engine_blocks = kv_cache_config.num_blocks
        self._worker: Worker | None = None
        self._hello: Hello | None = None
        self._outcome: Outcome | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's tensors, allocate the host tier. Raises when the tier cannot be had: better now than later."""
        tensors = [_spec(name, tensor) for name, tensor in kv_caches.items()]
        layout = describe(tensors, self._engine_blocks)
        config = self._config
        slots = slots_for(config.cpu_cache_gb, config.cpu_cache_override_num_blocks, layout.block_bytes * self.ranks)
        if slots < 1:
            raise ValueError(
                f"DYN_KVBM_CPU_CACHE_GB={config.cpu_cache_gb:g} holds no block: one block takes "
                f"{layout.block_bytes * self.ranks / 1e9:.6f} GB over all {self.ranks} ranks. Set it to more than that."
            )
        device = next(iter(kv_caches.values())).device
        slab = HostSlab(slots, layout.slot_bytes, config.copy_threads)
        copier = open_copier(str(device), layout, slab, self.rank, config.inject_faults)
        self._worker = Worker(self.rank, copier, {Tier.HOST: slots}, layout.num_blocks)
        self._hello = Hello(self.rank, layout.block_bytes, {Tier.HOST: slots}, layout.description)
        logger.info(
            "rank %d: %d layers, %d bytes a block, %d host slots, %s copies", self.rank, len(layout.layers),
            layout.block_bytes, slots, copier.name,
        )  # fmt: skip

    @property
    def hello(self) -> Hello | None:
        return self._hello

    def begin(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.begin(plan)

    def start_loads(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.start_loads(plan)

    def wait_layer(self, layer: str) -> None:
        if self._worker is not None:
            self._worker.wait_layer(layer)

    def start_stores(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.start_stores(plan)

    def poll(self) -> Outcome | None:
        return None if self._worker is None else self._worker.poll()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _spec(name: str, tensor: Any) -> TensorSpec:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"layer {name}: expected one KV tensor, got {type(tensor).__name__}")
    itemsize = tensor.element_size()
    return TensorSpec(
        name=name,
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(stride * itemsize for stride in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
