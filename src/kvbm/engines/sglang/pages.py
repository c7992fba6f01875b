"""A host pool of SGLang's as it looks from here: pages as addresses and sizes, and what makes their bytes differ."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

# A page, piece by piece: (address, bytes).
Page = Sequence[tuple[int, int]]

# Attributes of a pool, where it has them, that change the meaning of a page's bytes.
_SHAPE = (
    "layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim",
    "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim", "store_dtype", "head_group_num", "storage_format_tag",
    "dcp_size", "dcp_rank", "num_mamba_layers", "conv_dtype", "conv_state_shapes", "temporal_dtype",
    "temporal_state_shape",
)  # fmt: skip


def pages_of(pool: Any, host_indices: Any, count: int) -> list[Page]:
    """``count`` pages of a pool, given the indices of their tokens."""
    pointers, sizes = pool.get_page_buffer_meta(host_indices)
    if not count or len(pointers) % count or len(pointers) != len(sizes):
        raise ValueError(f"the pool describes {count} pages by {len(pointers)} pointers and {len(sizes)} sizes")
    each = len(pointers) // count
    pieces = list(zip(map(int, pointers), map(int, sizes), strict=True))
    return [pieces[at : at + each] for at in range(0, len(pieces), each)]


def page_bytes(pool: Any) -> int:
    """Bytes of one page of the pool."""
    import torch

    first = torch.arange(int(pool.page_size), dtype=torch.int64)
    return sum(size for _, size in pages_of(pool, first, 1)[0])


def shape_of(pool: Any) -> str:
    """Equal for pools whose pages are exchangeable, and for no others."""
    found = ((name, getattr(pool, name, None)) for name in _SHAPE)
    return " ".join([type(pool).__name__, *(f"{name}={value}" for name, value in found if value is not None)])


def gather(page: Page, target: int) -> None:
    """Copy the pieces of a page to one place. ctypes releases the interpreter for each."""
    for address, size in page:
        ctypes.memmove(target, address, size)
        target += size


def scatter(source: int, page: Page) -> None:
    for address, size in page:
        ctypes.memmove(address, source, size)
        source += size
