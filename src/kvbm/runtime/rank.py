"""One rank's share of the cache: the engine's tensors, the memory of the tiers, and the worker over both.

What every engine's worker half does at its start, in this order: :meth:`Rank.register` when the engine has made its KV
cache, :meth:`Rank.open` when it has warmed up. What happens after that is between the worker and the leader's plans.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from kvbm.config import Config, slots_for
from kvbm.plans import Hello, Tier
from kvbm.runtime.worker import Worker
from kvbm.storage import numa
from kvbm.storage.host import HostSlab
from kvbm.storage.layout import BlockLayout, LayoutError, TensorSpec, describe
from kvbm.transfer import open_copier

logger = logging.getLogger("kvbm")


class Rank:
    """Called from the engine's worker thread."""

    def __init__(self, config: Config, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.layout: BlockLayout | None = None
        self.worker: Worker | None = None
        self._config = config
        self._device = ""
        self._slots = 0
        self._slab: HostSlab | None = None

    def register(self, kv_caches: Mapping[str, Any], num_blocks: int) -> None:
        """Take the engine's tensors, one a layer, and ask for the host tier's memory. Raises when it cannot be had:
        better now than later. The memory is faulted in while the engine goes on with its own start."""
        tensors = [_spec(name, tensor) for name, tensor in kv_caches.items()]
        self.layout = layout = describe(tensors, num_blocks)
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

    def hello(self) -> Hello | None:
        """What the leader must know of this rank; None when there is no cache to serve."""
        if self.layout is None or self._slab is None:
            return None
        return Hello(self.rank, self.layout.block_bytes, {Tier.HOST: self._slots}, self.layout.description)

    def open(self) -> Hello | None:
        """Finish the start: the engine has warmed up and captured its graphs, so this is the time for CUDA calls of our
        own. Waits for the memory. Returns what :meth:`hello` does."""
        layout, slab = self.layout, self._slab
        if layout is not None and slab is not None and self.worker is None:
            slab.carve(self._slots, layout.slot_bytes)
            config = self._config
            copier = open_copier(
                self._device, layout, slab, self.rank, config.inject_faults, config.staging_mb << 20, config.stores
            )
            self.worker = Worker(self.rank, copier, {Tier.HOST: slab.slots}, layout.num_blocks)
            logger.info(
                "rank %d: %d layers, %d bytes a block in pieces of %d, %d host slots, %s copies", self.rank,
                len(layout.layers), layout.block_bytes, layout.merged()[0].size, slab.slots, copier.name,
            )  # fmt: skip
        return self.hello()

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None
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
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None
    return numa.node_of_pci(bus_id)
