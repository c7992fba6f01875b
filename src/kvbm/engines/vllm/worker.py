"""The worker's half: registers this rank's KV tensors and carries out the leader's plans on them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch

from kvbm.config import Config, slots_for
from kvbm.plans import Hello, LoadPlan, StepPlan, Tier
from kvbm.runtime.worker import Outcome, Worker
from kvbm.storage import numa
from kvbm.storage.host import HostSlab
from kvbm.storage.layout import BlockLayout, LayoutError, TensorSpec, describe
from kvbm.transfer import open_copier

logger = logging.getLogger("kvbm")


# Worker halves of this process by (engine, rank). Where vLLM runs scheduler and worker in one process and thread, as it
# does with one GPU, the leader reaches its only worker here, several milliseconds before the step's metadata does.
_local: dict[tuple[str, int], WorkerHalf] = {}


def find_local(engine_id: str, rank: int) -> WorkerHalf | None:
    return _local.get((engine_id, rank))


class WorkerHalf:
    """Called by the connector from vLLM's worker thread, in the order of :mod:`kvbm.transfer.base`."""

    def __init__(self, config: Config, vllm_config: Any, kv_cache_config: Any) -> None:
        self._config = config
        parallel = vllm_config.parallel_config
        self.ranks = parallel.world_size
        self.rank = parallel.rank % self.ranks
        self._engine_blocks = kv_cache_config.num_blocks
        self._layout: BlockLayout | None = None
        self._device = ""
        self._slab: HostSlab | None = None
        self._worker: Worker | None = None
        self._name = (vllm_config.kv_transfer_config.engine_id, self.rank)

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Take the engine's tensors and ask for the host tier's memory. Raises when it cannot be had: better now than
        later. The memory is faulted in while vLLM goes on with its own start."""
        tensors = [_spec(name, tensor) for name, tensor in kv_caches.items()]
        self._layout = layout = describe(tensors, self._engine_blocks)
        self._device = str(next(iter(kv_caches.values())).device)
        config = self._config
        slots = slots_for(config.cpu_cache_gb, config.cpu_cache_override_num_blocks, layout.block_bytes * self.ranks)
        if slots < 1:
            raise ValueError(
                f"DYN_KVBM_CPU_CACHE_GB={config.cpu_cache_gb:g} holds no block: one block takes "
                f"{layout.block_bytes * self.ranks / 1e9:.6f} GB over all {self.ranks} ranks. Set it to more than that."
            )
        node = None if config.disable_numa else _numa_node(self._device)
        self._slots = slots
        self._slab = HostSlab(slots * layout.slot_bytes, node=node)

    def meet(self) -> Hello | None:
        """Finish the start: vLLM has warmed up and captured its graphs, so this is the time for CUDA calls of our own.

        Returns what the leader must know; None when there is no cache to serve.
        """
        layout, slab = self._layout, self._slab
        if layout is None or slab is None:
            return None
        if self._worker is None:
            slab.carve(self._slots, layout.slot_bytes)
            config = self._config
            copier = open_copier(
                self._device, layout, slab, self.rank, config.inject_faults, config.staging_mb << 20, config.stores
            )
            self._worker = Worker(self.rank, copier, {Tier.HOST: slab.slots}, layout.num_blocks)
            self._thread = threading.get_ident()
            _local[self._name] = self
            logger.info(
                "rank %d: %d layers, %d bytes a block in pieces of %d, %d host slots, %s copies", self.rank,
                len(layout.layers), layout.block_bytes, layout.merged()[0].size, slab.slots, copier.name,
            )  # fmt: skip
        return Hello(self.rank, layout.block_bytes, {Tier.HOST: slab.slots}, layout.description)

    def begin(self, plan: StepPlan) -> None:
        if self._worker is not None:
            self._worker.begin(plan)

    def prefetch(self, slots: list[int], tokens: int) -> bool:
        if self._worker is None or threading.get_ident() != self._thread:
            return False
        return self._worker.prefetch(slots, tokens)

    def end_prefetch(self) -> None:
        if self._worker is not None:
            self._worker.end_prefetch()

    def start_early(self, plan: LoadPlan) -> bool:
        """Begin a load before its step. False when that cannot be done from this thread; nothing has happened then."""
        if self._worker is None or threading.get_ident() != self._thread:
            return False
        self._worker.start_early(plan)
        return True

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
        _local.pop(self._name, None)
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        elif self._slab is not None:
            self._slab.close()
        self._slab = None


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


def _numa_node(device: str) -> int | None:
    """The NUMA node of this rank's own GPU."""
    if not device.startswith("cuda"):
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None
    return numa.node_of_pci(bus_id)
