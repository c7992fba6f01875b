"""SGLang's host pools, and the backend over them, where there is no server and no GPU.

Imported by tests that have made sure that there is an SGLang.
"""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MambaStateBufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHABufferInfo, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvbm.engines.sglang.__main__ import extra_config

PAGE = 16  # tokens
LAYERS, HEADS, DIM = 3, 2, 16
PAGE_BYTES = 2 * LAYERS * PAGE * HEADS * DIM * 2

# Stands for the model that a server has loaded in this process.
MODEL = torch.nn.Linear(2, 2, bias=False)
MODEL.weight.data.fill_(1.0)


def host_pool(layout="page_first", pages=64, layers=LAYERS):
    """A real host pool. Of the GPU's side it has two tensors to take its shape from."""
    keys, values = ([torch.zeros((PAGE, HEADS, DIM), dtype=torch.bfloat16) for _ in range(layers)] for _ in range(2))
    pointers = [torch.tensor([tensor.data_ptr() for tensor in part], dtype=torch.uint64) for part in (keys, values)]
    buffers = KVBuffers(
        k=tuple(keys), v=tuple(values), k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers, page_size=PAGE, head_num=HEADS, head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )  # fmt: skip
    return MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0, end_layer=layers,
        host_token_capacity=pages * PAGE,
    )  # fmt: skip


def latent_pool(layout="page_first", pages=64):
    """A real host pool of latent attention (MLA): one row a token and layer, the same on every rank."""
    rows = tuple(torch.zeros((PAGE, 1, 80), dtype=torch.bfloat16) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=rows, data_ptrs=torch.tensor([layer.data_ptr() for layer in rows], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS, page_size=PAGE, kv_lora_rank=64,
        qk_rope_head_dim=16, kv_cache_dim=80, dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    return MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False, device_capacity_tokens=PAGE, start_layer=0, end_layer=LAYERS,
        target_layer_num=LAYERS, host_token_capacity=pages * PAGE,
    )  # fmt: skip


def storage_config(tmp_path, rank=0, ranks=1, mla=False, **extra):
    # A page of this model is computed sooner than any disk is asked for it.
    values = {"disk_cache_override_num_blocks": 256, "disk_cache_dir": str(tmp_path), "disk_bounce_mb": 1}
    values = {**values, "load": "always", **extra}
    return HiCacheStorageConfig(
        tp_rank=rank, tp_size=ranks, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=mla,
        enable_storage_metrics=False, is_page_first_layout=True, model_name=__file__,
        extra_config={**json.loads(extra_config()), **values},
    )  # fmt: skip


def serve_no_adapters(patch):
    """For the arguments of the server, which this process has none of."""
    patch(runtime_context, "get_server_args", lambda: SimpleNamespace(enable_lora=None, lora_paths=None))


def hashes(*numbers):
    return [hashlib.sha256(str(number).encode()).hexdigest() for number in numbers]


def fill(pool):
    pool.kv_buffer.view(torch.int16).random_(-30000, 30000)
    return pool.kv_buffer.clone()


def page_of(pool, index, content=None):
    """The bytes of a page, of now or of an earlier copy of the pool's memory."""
    now = pool.kv_buffer
    try:
        pool.kv_buffer = now if content is None else content
        return pool.get_data_page(int(index)).contiguous().view(torch.uint8).flatten().numpy().tobytes()
    finally:
        pool.kv_buffer = now


def mamba_pool(states=16):
    """A real pool of Mamba states on the host: one state is a page."""
    info = MambaStateBufferInfo(temporal=torch.zeros(2, 4, 2, 8, 4), conv=(torch.zeros(2, 4, 24, 3),))
    return MambaPoolHost(
        info, 2.0, 0, device_capacity=states - 1, pin_memory=False, layout="page_first",
    )  # fmt: skip


def state_of(pool, index):
    return pool.get_data_page(int(index)).numpy().tobytes()
