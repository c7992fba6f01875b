"""Packed blocks on a GPU: the bytes in their slots are those that numpy packs, and every way back gives the block."""

from __future__ import annotations

import ctypes
import random
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from devices import ON_CUDA  # noqa: E402
from engines import do, generate  # noqa: E402

import layouts  # noqa: E402
from kvbm import config as settings  # noqa: E402
from kvbm.runtime.rank import Rank  # noqa: E402
from kvbm.tiers.host.slab import HostSlab  # noqa: E402
from kvbm.transfer import open_copier  # noqa: E402
from kvbm.transfer.base import When  # noqa: E402
from kvbm.transfer.packing import Tile, pack, pack_layout  # noqa: E402

pytestmark = pytest.mark.gpu

BLOCKS = 2_000 if ON_CUDA else 60
COMPARED = 50
HEADS = 8 if ON_CUDA else 2
STAGING = 64 << 20
MANY_TOKENS = 100_000  # too much to compute for a load in bulk
UNPACKABLE = [7, 50]


def fill(tensors, device):
    """Like KV; with every bit pattern in the first blocks, and two blocks that cannot be packed."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for i, tensor in enumerate(tensors):
        source = torch.randn(tensor.shape, device=device) * 2.0 ** (3 * i - 8)
        source[torch.rand(source.shape, device=device) < 0.003] *= 2.0**-25
        source[torch.rand(source.shape, device=device) < 0.01] = 0
        tensor.copy_(source.to(torch.bfloat16))
        blocks = layouts.by_block(tensor, BLOCKS)
        for block in UNPACKABLE:
            blocks[block].random_(-32768, 32768)
    # In memory order: 128 neighbours have one exponent.
    first = tensors[0]
    order = sorted(range(first.dim()), key=lambda axis: -first.stride(axis))
    flat = first.view(torch.int16).permute(order)
    if flat.is_contiguous() and flat.numel() >= len(every):
        flat.reshape(-1)[: len(every)].copy_(every.to(device))


def packed_by_numpy(tensors, layout, block):
    """The bytes of a block in the order of its slot, from the addresses that the layout names."""
    tile = Tile(layout.tile_values)
    parts = []
    for segment in layout.segments:
        raw = torch.empty(segment.size, dtype=torch.uint8)
        source = bytes_at(tensors, segment.address + block * segment.stride, segment.size)
        raw.copy_(source)
        values = raw.numpy().view(np.uint16).reshape(-1, tile.values)
        packed = np.empty((len(values), tile.size), np.uint8)
        pack(values, packed)
        parts.append(packed.tobytes())
    return b"".join(parts)


def bytes_at(tensors, address, size):
    for tensor in tensors:
        storage = tensor.untyped_storage()
        start = address - storage.data_ptr()
        if 0 <= start < storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            return flat[start : start + size]
    raise AssertionError("no tensor has this address")


@pytest.mark.parametrize(
    "make", [layouts.packed_nhd, layouts.k_and_v_apart, layouts.mla, layouts.cross_layer, layouts.head_outside]
)
def test_slots_hold_the_bytes_that_numpy_packs_and_every_block_comes_back(device, make, stream):
    with stream:
        tensors = make(device, BLOCKS, HEADS)
        layout = pack_layout(layouts.layout_of(tensors, BLOCKS))
        slab = HostSlab(BLOCKS * layout.slot_bytes).carve(BLOCKS, layout.slot_bytes)
        if ON_CUDA:
            from kvbm.transfer.cuda import CudaCopier

            copier = CudaCopier(
                layout, slab, torch.device(device), STAGING, bulk_bytes=layout.block_bytes * BLOCKS // 2
            )
        else:
            copier = open_copier(device, layout, slab, 0)
        try:
            fill(tensors, device)
            before = [layouts.by_block(tensor, BLOCKS).clone() for tensor in tensors]
            blocks = list(range(BLOCKS))
            slots = random.Random(1).sample(blocks, BLOCKS)
            copier.begin_step([])
            ticket = copier.store(blocks, slots)
            ticket.wait()
            assert ticket.done()
            assert not list(ticket.bad), ticket.reason
            assert list(ticket.unpackable) == UNPACKABLE
            for block in [*UNPACKABLE, *random.Random(2).sample(blocks, COMPARED)]:
                there = ctypes.string_at(slab.address + slots[block] * slab.slot_bytes, layout.block_bytes)
                assert there == packed_by_numpy(tensors, layout, block), block
            good = [block for block in blocks if block not in UNPACKABLE]
            for when, tokens, count in (
                (When.BY_LAYER, 1, len(good)), (When.BY_LAYER, MANY_TOKENS, len(good)), (When.NOW, 1, len(good)),
                (When.LATER, 1, len(good)), (When.BY_LAYER, 1, 3), (When.LATER, 1, 3),
            ):  # fmt: skip
                for tensor in tensors:
                    layouts.by_block(tensor, BLOCKS).fill_(-1)
                copier.begin_step([])
                some = good[:count]
                ticket = copier.load([slots[block] for block in some], some, [], when, tokens)
                if when is When.BY_LAYER:
                    for layer in layout.layers:
                        copier.wait_layer(layer)
                    assert copier.end_load(ticket)
                ticket.wait()
                for tensor, expected in zip(tensors, before, strict=True):
                    assert torch.equal(layouts.by_block(tensor, BLOCKS)[some], expected[some]), (when, tokens, count)
        finally:
            copier.close()


@pytest.mark.skipif(not ON_CUDA, reason="for a GPU only")
def test_the_trial_at_start_finds_every_byte_and_measures(device, figure):
    from kvbm.transfer.packing_trial import try_packing

    tensors = layouts.packed_nhd(device, BLOCKS, HEADS)
    layout = pack_layout(layouts.layout_of(tensors, BLOCKS))
    torch.cuda.empty_cache()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    trial = try_packing(layout, torch.device(device))
    assert trial.is_exact
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() - reserved <= 72 << 20
    figure(f"packing: the GPU unpacks {trial.unpacked / 1e9:.0f} GB/s, the bus carries {trial.bus / 1e9:.0f} GB/s")


def float16(device, blocks, heads):
    return [tensor.to(torch.float16) for tensor in layouts.packed_nhd(device, blocks, heads)]


def tiny(device, blocks, heads):
    return layouts.packed_nhd(device, blocks, 1)[:1]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (layouts.packed_nhd, ""),
        (layouts.k_and_v_apart, ""),
        (layouts.mla, ""),
        (layouts.fp8, "its values are uint8, not bfloat16"),
        (float16, "its values are float16, not bfloat16"),
        (tiny, "are too small for the GPU's copy engine"),
    ],
)
def test_a_rank_packs_by_itself_where_it_wins_and_says_why_not_where_it_does_not(
    make, reason, device, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if not ON_CUDA and make not in (layouts.fp8, float16):
        reason = "an engine on a CPU gains no time by it"
    tensors = {f"layer {i}": tensor for i, tensor in enumerate(make(device, 100, 8))}
    rank = Rank(settings.load(extra={"cpu_cache_override_num_blocks": 10}, environ={}, files=[]), 0, 1)
    with caplog.at_level("INFO", "kvbm"):
        rank.register(tensors, 100)
    try:
        assert (rank.layout.tile_values == 0) is bool(reason), caplog.text
        said = f"KVBM_PACK=auto: blocks of this KV cache are not packed: .*{reason}" if reason else "blocks are packed"
        assert re.search(said, caplog.text), caplog.text
    finally:
        rank.close()


PROMPT = [300 + 7 * i % 3000 for i in range(400)]


def test_an_engine_with_fp8_kv_packs_nothing_and_its_blocks_come_back(run_engine):
    if not ON_CUDA:
        pytest.skip("vLLM has no KV cache in fp8 on a CPU")
    steps = [
        generate(PROMPT, max_tokens=8), do("drain"), generate(PROMPT, name="reference", max_tokens=8), do("drain"),
        do("reset"), generate(PROMPT, name="back", max_tokens=8), do("drain"), do("metrics", "metrics"),
    ]  # fmt: skip
    engine = {"kv_cache_dtype": "fp8", "max_model_len": 1024, "num_gpu_blocks_override": 200, "enforce_eager": True}
    outcome = run_engine("fp8", "dense", steps, engine)
    assert outcome["metrics"]["kvbm_packed_ratio"] == 1
    assert "KVBM_PACK=auto: blocks of this KV cache are not packed: its values are" in outcome.output
    assert outcome["back"]["cached"][0] >= 384
    assert outcome.tokens("back") == outcome.tokens("reference")
