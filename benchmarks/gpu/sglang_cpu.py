"""SGLang's hierarchical cache where there is no GPU: copies by torch stand in for SGLang's kernels.

All else is SGLang's own: server, scheduler, radix tree, model, cache controller and its threads. Imported by every
process of a server that tries a script on a CPU.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost as Pool


def install() -> None:
    make = Pool.__init__

    def unpinned(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **{**named, "pin_memory": False})

    def load(
        self: Any, device_pool: Any, host: Any, device: Any, layer: int, io_backend: str, *, is_draft: bool = False
    ) -> None:
        if 0 <= layer < self.target_layer_num:
            self.device_k_buffers[layer][device] = self.k_data_refs[layer][host]
            self.device_v_buffers[layer][device] = self.v_data_refs[layer][host]

    def back_up(self: Any, device_pool: Any, host: Any, device: Any, io_backend: str) -> None:
        for layer in range(self.layer_num):
            self.k_data_refs[layer][host] = self.device_k_buffers[layer][device]
            self.v_data_refs[layer][host] = self.device_v_buffers[layer][device]

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GB, which a small machine may not have
    Pool.__init__ = unpinned
    Pool.load_to_device_per_layer = load
    Pool.backup_from_device_all_layer_physical = back_up
