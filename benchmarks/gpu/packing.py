"""Packed blocks on a GPU: byte for byte as numpy packs them, the speed of the kernels, and 32k-token loads.

    python benchmarks/gpu/packing.py [--json FILE] [--only check,kernels,copier,beside] [--kv FILE]

The cache has the shape of Qwen3-8B: 36 layers, 8 KV heads of 128, blocks of 16 tokens, 2,048 blocks of 2.36 MB. Values
are normal with a scale for each channel, a few of them far too large, zero or tiny; or, with `--kv`, those of a real
model (benchmarks/packing.py --kv), over and over. Prints a JSON line for each figure.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "src")]

from kvbm.tiers.host.slab import HostSlab  # noqa: E402
from kvbm.transfer import kernel_copies  # noqa: E402
from kvbm.transfer.base import When  # noqa: E402
from kvbm.transfer.cuda import CudaCopier  # noqa: E402
from kvbm.transfer.kernels import Launcher  # noqa: E402
from kvbm.transfer.layout import BlockLayout, TensorSpec, describe  # noqa: E402
from kvbm.transfer.packing import GROUP, Tile, pack, pack_layout  # noqa: E402
from kvbm.transfer.packing_kernels import pack_pieces, unpack_pieces  # noqa: E402

LAYERS, HEADS, DIM, TOKENS = 36, 8, 128, 16
DEVICE = torch.device("cuda:0")
MANY_TOKENS = 100_000  # too much to compute for a load in bulk
lines: list[dict[str, object]] = []


def tell(**figures: object) -> None:
    lines.append(figures)
    print(json.dumps(figures), flush=True)


class Cache:
    """An engine's cache: a tensor for each layer, K and V of a block together."""

    def __init__(self, blocks: int, kv: Path | None) -> None:
        self.blocks = blocks
        self.real: torch.Tensor | None = None  # int16[layers, values]
        if kv is not None:
            values = np.load(kv)
            self.real = torch.from_numpy(values.reshape(len(values), -1).view(np.int16)).to(DEVICE)
        shape = (blocks, 2, TOKENS, HEADS, DIM)
        self.tensors = [torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(LAYERS)]
        self.layout = describe([_spec(i, tensor) for i, tensor in enumerate(self.tensors)], blocks)
        self.packed = pack_layout(self.layout)

    def fill(self, outliers: float = 1.0) -> None:
        """``outliers``: how many times larger one channel of each head is."""
        torch.manual_seed(0)
        if self.real is not None:
            for i, words in enumerate(self.words()):
                flat, values = words.view(-1), self.real[i % len(self.real)]
                for start in range(0, len(flat), len(values)):
                    part = flat[start : start + len(values)]
                    part.copy_(values[: len(part)])
            return
        for tensor in self.tensors:
            tensor.normal_()
            tensor.mul_(torch.exp2(torch.randn(HEADS, DIM, device=DEVICE)).to(tensor.dtype))
            tensor[..., 5].mul_(outliers)
            flat = tensor.view(-1)
            flat[::5003] = 0
            flat[::9973] *= 2.0**-20

    def words(self) -> list[torch.Tensor]:
        return [tensor.view(torch.int16) for tensor in self.tensors]

    def raw(self, block: int) -> np.ndarray:
        """The bytes of a block in the order of its slot."""
        return torch.stack([tensor[block].flatten() for tensor in self.words()]).cpu().numpy().view(np.uint16)


def _spec(layer: int, tensor: torch.Tensor) -> TensorSpec:
    strides = tuple(stride * 2 for stride in tensor.stride())
    return TensorSpec(f"layer{layer}", tensor.data_ptr(), tuple(tensor.shape), strides, 2, "bfloat16")


def packed_by_numpy(values: np.ndarray, layout: BlockLayout) -> tuple[bytes, bool]:
    """The packed block, and whether it does not fit."""
    tile = Tile(layout.tile_values)
    values = values.reshape(-1, tile.values)
    packed = np.empty((len(values), tile.size), np.uint8)
    overflows = pack(values, packed)
    return packed.tobytes(), len(overflows) > 0


def open_copier(layout: BlockLayout, slots: int, staging: int) -> CudaCopier:
    slab = HostSlab(slots * layout.slot_bytes).carve(slots, layout.slot_bytes)
    return CudaCopier(layout, slab, DEVICE, staging)


def slot_bytes(copier: CudaCopier, slot: int) -> bytes:
    return ctypes.string_at(copier._slab.address + slot * copier._slab.slot_bytes, copier._layout.block_bytes)


def all_patterns(cache: Cache) -> None:
    """Blocks 0 to 9 hold every bit pattern: in order, as escapes, and infinities and NaNs among zeros. Block 10 cannot
    be packed."""
    every = np.arange(65536, dtype=np.uint16)
    exponents = every >> 7 & 0xFF
    finite = every[exponents < 255][np.argsort(exponents[exponents < 255], kind="stable")]
    tiles = np.zeros((14 * 80, 4096), np.uint16)
    for tile, start in enumerate(range(0, len(finite), 60)):
        part = finite[start : start + 60]
        base = min(int((part >> 7 & 0xFF).max()) + 20, 254)
        tiles[tile] = base << 7
        tiles[tile, 64::GROUP] = base - 4 << 7
        tiles[tile, np.arange(len(part)) * 67] = part
    special = np.zeros(10 * 32768, np.uint16)
    special[np.arange(256) * GROUP] = every[exponents == 255]
    words = cache.words()
    put(words[0][:2], every)
    for layer in range(14):
        put(words[1 + layer][:10], tiles[layer * 80 : layer * 80 + 80])
    put(words[20][:10], special)
    words[3][10].random_(-32768, 32768)


def put(target: torch.Tensor, values: np.ndarray) -> None:
    target.view(-1).copy_(torch.from_numpy(values.view(np.int16).ravel()))


def check(cache: Cache) -> None:
    for outliers in (1.0,) if cache.real is not None else (1.0, 60.0, 1000.0):
        cache.fill(outliers)
        if cache.real is None:
            all_patterns(cache)
        before = [words.clone() for words in cache.words()]
        copier = open_copier(cache.packed, cache.blocks, 2 << 30)
        try:
            order = torch.randperm(cache.blocks).tolist()
            copier.begin_step([])
            ticket = copier.store(list(range(cache.blocks)), order)
            ticket.wait()
            unpackable = list(ticket.unpackable)
            compared = [*range(24), *range(100, cache.blocks, 101)]
            same = True
            for block in compared:
                expected, is_over = packed_by_numpy(cache.raw(block), cache.packed)
                same &= slot_bytes(copier, order[block]) == expected and (block in unpackable) == is_over
            tile = Tile(cache.packed.tile_values)
            sample = np.frombuffer(b"".join(slot_bytes(copier, order[b]) for b in compared[24:]), np.uint8)
            counts = sample.reshape(-1, tile.size)[:, tile.count].astype(int)
            tell(what="packed bytes equal numpy's", ok=same, blocks=len(compared), outliers=outliers,
                 unpackable=unpackable[:5], escapes=counts.mean() / tile.values, most_of_a_tile=int(counts.max()),
                 ratio=cache.packed.slot_bytes / cache.layout.slot_bytes)  # fmt: skip
            good = torch.ones(cache.blocks, dtype=torch.bool, device=DEVICE)
            good[unpackable] = False
            for when, tokens in ((When.BY_LAYER, 1), (When.BY_LAYER, MANY_TOKENS), (When.NOW, 1), (When.LATER, 1)):
                for words in cache.words():
                    words.fill_(-1)
                load(copier, cache, order, when, tokens)
                wrong = [not torch.equal(a[good], b[good]) for a, b in zip(cache.words(), before, strict=True)]
                tell(what="round trip", ok=not any(wrong), when=when.value, tokens=tokens, outliers=outliers)
        finally:
            copier.close()


def load(copier: CudaCopier, cache: Cache, slots: list[int], when: When, tokens: int) -> float:
    """Seconds until all blocks are there."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    copier.begin_step([])
    ticket = copier.load(slots, list(range(len(slots))), [], when, tokens)
    if when is When.BY_LAYER:
        for layer in cache.layout.layers:
            copier.wait_layer(layer)
        assert copier.end_load(ticket)
    ticket.wait()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def milliseconds(work: Callable[..., None], *arguments: object) -> float:
    """By the GPU's clock, the best of three."""
    work(*arguments)
    torch.cuda.synchronize()
    best = 1e9
    for _ in range(3):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work(*arguments)
        ended.record()
        torch.cuda.synchronize()
        best = min(best, began.elapsed_time(ended))
    return best


def kernels(cache: Cache) -> None:
    """The kernels alone: within device memory, and unpacking from pinned host memory."""
    cache.fill()
    blocks = min(512, cache.blocks)
    layout, tile = cache.packed, Tile(cache.packed.tile_values)
    raw = blocks * layout.raw_bytes
    row = layout.block_bytes
    rows = torch.empty(blocks, row, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(blocks, row, dtype=torch.uint8, pin_memory=True)
    flags = torch.zeros(blocks, dtype=torch.int32, pin_memory=True)
    table = kernel_copies.segment_table(layout, DEVICE)
    pairs = torch.arange(blocks, device=DEVICE).repeat(2)
    arrived = torch.zeros(LAYERS, dtype=torch.int32, device=DEVICE)
    constants = kernel_copies.tile_constants(layout.segments[0], tile.values)
    segments = len(layout.segments)
    pieces = segments * blocks
    for warps in (2, 4, 8):
        packer, unpacker = Launcher(pack_pieces, warps), Launcher(unpack_pieces, warps)
        to_rows = (0, blocks, rows.data_ptr(), row, flags.data_ptr(), 0, segments, blocks)
        for programs in (8, 16, 32, 132, 528, pieces):
            took = milliseconds(packer.start, programs, (table, pairs), to_rows, constants)
            tell(what="pack on the device", warps=warps, programs=programs, gb_s_of_raw=raw / took / 1e6,
                 sm_ms_of_32k=took * min(programs, 132) * 2048 / blocks)  # fmt: skip
        host.copy_(rows)
        for what, source, counts in (
            ("unpack on the device", rows, (8, 16, 32, 64, 132, 264, 528)),
            ("unpack from host memory", host, (8, 16, 32, 64, 132)),
        ):
            from_rows = (0, blocks, source.data_ptr(), row, 0, segments, blocks)
            for programs in counts:
                took = milliseconds(unpacker.start, programs, (table, pairs, arrived), from_rows, (*constants, True))
                tell(what=what, warps=warps, programs=programs, gb_s_of_raw=raw / took / 1e6)


def copier(cache: Cache) -> None:
    """Loads and stores of a 32k-token prompt and of shorter ones, raw and packed."""
    cache.fill()
    everything = list(range(cache.blocks))
    for name, layout in (("raw", cache.layout), ("packed", cache.packed)):
        began = time.perf_counter()
        copies = open_copier(layout, cache.blocks, 2 << 30)
        tell(what="start", kind=name, seconds=time.perf_counter() - began, copies=copies.name)
        try:
            for blocks in (everything, everything[:512], everything[:64]):
                took = []
                for _ in range(3):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    copies.begin_step([])
                    copies.store(blocks, blocks).wait()
                    took.append(time.perf_counter() - began)
                tell(what="store", kind=name, blocks=len(blocks), ms=1e3 * statistics.median(took))
            for blocks in (everything, everything[:512], everything[:64], everything[:8]):
                for when, tokens in ((When.BY_LAYER, 1), (When.BY_LAYER, MANY_TOKENS), (When.LATER, 1)):
                    took = [load(copies, cache, blocks, when, tokens) for _ in range(6)][1:]
                    tell(what="load", kind=name, blocks=len(blocks), when=when.value, tokens=tokens,
                         ms=1e3 * statistics.median(took), ms_all=[round(1e3 * t, 2) for t in took])  # fmt: skip
        finally:
            copies.close()


def beside(cache: Cache) -> None:
    """Matrix products, as a prefill has them, beside stores of 32k tokens: how much longer do they take?"""
    cache.fill()
    left, right = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    everything = list(range(cache.blocks))

    def products() -> float:
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        for _ in range(300):
            torch.mm(left, right)
        ended.record()
        torch.cuda.synchronize()
        return began.elapsed_time(ended)

    products()
    for name, layout in (("raw", cache.layout), ("packed", cache.packed)):
        copies = open_copier(layout, cache.blocks, 1 << 30)
        try:
            alone, stored = [], []
            for _ in range(8):
                alone.append(products())
                copies.begin_step([])
                ticket = copies.store(everything, everything)
                stored.append(products())
                ticket.wait()
            tell(what="products beside a store", kind=name, alone_ms=statistics.median(alone),
                 beside_ms=statistics.median(stored), store_ms=1e3 * ticket.seconds)  # fmt: skip
        finally:
            copies.close()


def main() -> None:
    parts = {"check": check, "kernels": kernels, "copier": copier, "beside": beside}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", default=",".join(parts))
    parser.add_argument("--blocks", type=int, default=2048)
    parser.add_argument("--kv", type=Path, help="KV of a real model to fill the cache with")
    args = parser.parse_args()
    began = time.perf_counter()
    tell(what="machine", gpu=torch.cuda.get_device_name(DEVICE), torch=torch.__version__, kv=args.kv and args.kv.name)
    cache = Cache(args.blocks, args.kv)
    for name in args.only.split(","):
        parts[name](cache)
        tell(what="part over", part=name, seconds=time.perf_counter() - began)
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
