"""KV caches as engines lay them out: a tensor a layer, whatever lies behind them. Contents are not set."""

from __future__ import annotations

import torch

from kvbm.transfer.layout import BlockLayout, TensorSpec, describe


def packed_nhd(device, blocks, heads=2):
    """[blocks, heads, tokens, 2 * dim], tokens outermost in memory: vLLM's default on GPUs."""
    shape = (blocks, 16, heads, 64)
    return [torch.empty(shape, dtype=torch.bfloat16, device=device).permute(0, 2, 1, 3) for _ in range(3)]


def packed_hnd(device, blocks, heads=2):
    return [torch.empty(blocks, heads, 16, 64, dtype=torch.float32, device=device) for _ in range(3)]


def k_and_v_apart(device, blocks, heads=2):
    return [torch.empty(2, blocks, 16, heads, 32, dtype=torch.bfloat16, device=device) for _ in range(3)]


def mla(device, blocks, heads=2):
    return [torch.empty(blocks, 16, 576, dtype=torch.bfloat16, device=device) for _ in range(4)]


def fp8(device, blocks, heads=2):
    return [torch.empty(blocks, heads, 16, 48, dtype=torch.uint8, device=device) for _ in range(2)]


def cross_layer(device, blocks, heads=2):
    """One storage, all layers of a block together."""
    storage = torch.empty(blocks, 4, 16, heads, 64, dtype=torch.bfloat16, device=device)
    return [storage[:, layer].permute(0, 2, 1, 3) for layer in range(4)]


def one_storage(device, blocks, heads=2):
    """One storage, layer after layer."""
    storage = torch.empty(3, blocks, heads, 16, 64, dtype=torch.float32, device=device)
    return list(storage)


def small_pages(device, blocks, heads=2):
    """The kernel's pages are half a block."""
    return [torch.empty(blocks * 2, heads, 8, 64, dtype=torch.float32, device=device) for _ in range(2)]


def head_outside(device, blocks, heads=2):
    """Heads before layers, as in a cross-layer HND cache: a block of one layer is scattered."""
    storage = torch.empty(blocks, heads, 3, 16, 64, dtype=torch.bfloat16, device=device)
    return [storage[:, :, layer] for layer in range(3)]


def unequal_layers(device, blocks, heads=2):
    return [torch.empty(blocks, 16, width, dtype=torch.bfloat16, device=device) for width in (64, 576, 24)]


def odd_bytes(device, blocks, heads=2):
    return [torch.empty(blocks, 7, 3, dtype=torch.uint8, device=device) for _ in range(2)]


LAYOUTS = [packed_nhd, packed_hnd, k_and_v_apart, mla, fp8, cross_layer, one_storage, small_pages, head_outside,
           unequal_layers, odd_bytes]  # fmt: skip


def layout_of(tensors: list[torch.Tensor], blocks: int) -> BlockLayout:
    return describe([_spec(f"layer{i}", tensor) for i, tensor in enumerate(tensors)], blocks)


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    size = tensor.element_size()
    strides = tuple(stride * size for stride in tensor.stride())
    return TensorSpec(name, tensor.data_ptr(), tuple(tensor.shape), strides, size, str(tensor.dtype))


def by_block(tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """A layer's tensor with its blocks as first axis, as numbers that compare bit for bit."""
    axis = 0 if tensor.shape[0] % blocks == 0 else 1
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.view(whole).unflatten(axis, (blocks, -1)).movedim(axis, 0)
