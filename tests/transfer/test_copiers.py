"""All copiers keep the same promises, whatever the engine's layout: one suite, every backend, every layout."""

from __future__ import annotations

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import layouts  # noqa: E402
from kvbm.tiers.host.slab import HostSlab  # noqa: E402
from kvbm.transfer import open_copier  # noqa: E402
from kvbm.transfer.base import When  # noqa: E402
from kvbm.transfer.packing import pack_layout  # noqa: E402
from layouts import LAYOUTS, by_block, layout_of, packed_nhd  # noqa: E402

BLOCKS = 24
SLOTS = 40


DEVICES = [
    "cpu",
    pytest.param(
        "cuda:0",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")],
    ),
]


# Every layout as it is, and packed where it can be.
CASES = [pytest.param((make, False), id=make.__name__) for make in LAYOUTS]
CASES += [
    pytest.param((make, True), id=f"{make.__name__}, packed")
    for make in (packed_nhd, layouts.k_and_v_apart, layouts.mla, layouts.cross_layer, layouts.head_outside)
]


class Cache:
    """An engine's cache with a copier on it."""

    def __init__(self, make, device, staging=0, pack=False):
        self.tensors = make(device, BLOCKS)
        self.layout = layout_of(self.tensors, BLOCKS)
        if pack:
            self.layout = pack_layout(self.layout)
        self.copier = open_copier(
            device,
            self.layout,
            HostSlab(SLOTS * self.layout.slot_bytes).carve(SLOTS, self.layout.slot_bytes),
            rank=0,
            staging=staging,
        )
        for tensor in self.tensors:
            tensor.copy_(torch.randint(0, 100, tensor.shape, dtype=torch.int64).to(tensor.dtype))

    def read(self, block):
        return [by_block(tensor, BLOCKS)[block].cpu().clone() for tensor in self.tensors]

    def wipe(self, block):
        for tensor in self.tensors:
            by_block(tensor, BLOCKS)[block].zero_()

    def store(self, blocks, slots):
        self.copier.begin_step([])
        ticket = self.copier.store(blocks, slots)
        ticket.wait()
        assert ticket.done()
        assert not list(ticket.bad)

    def load(self, slots, blocks, when=When.LATER):
        self.copier.begin_step([])
        ticket = self.copier.load(slots, blocks, [], when)
        if when is When.BY_LAYER:
            for name in self.layout.layers:
                self.copier.wait_layer(name)
        assert self.copier.end_load(ticket)
        ticket.wait()
        assert ticket.done()
        assert not list(ticket.bad)


@pytest.fixture(params=CASES)
def cache(request, device):
    make, pack = request.param
    made = Cache(make, device, pack=pack)
    yield made
    made.copier.close()


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("when", list(When))
def test_blocks_come_back_bit_for_bit_and_others_stay_untouched(cache, when):
    order = random.Random(3)
    blocks = order.sample(range(BLOCKS), 10)
    slots = order.sample(range(SLOTS), 10)
    targets = order.sample([b for b in range(BLOCKS) if b not in blocks], 10)
    before = [cache.read(block) for block in range(BLOCKS)]
    cache.store(blocks, slots)
    for block in blocks:
        cache.wipe(block)
    cache.load(slots, targets, when)
    for block, target in zip(blocks, targets, strict=True):
        assert same(cache.read(target), before[block])
    for block in range(BLOCKS):
        if block not in blocks and block not in targets:
            assert same(cache.read(block), before[block])


def test_neighbouring_blocks_are_copied_as_runs_and_still_right(cache):
    before = [cache.read(block) for block in range(BLOCKS)]
    cache.store(list(range(12)), list(range(5, 17)))
    cache.load(list(range(5, 17)), list(range(12, 24)))
    assert all(same(cache.read(12 + i), before[i]) for i in range(12))


@pytest.mark.parametrize(("stored", "loaded"), [(1, -1), (-1, 1), (-1, -1)])
def test_runs_may_count_down(cache, stored, loaded):
    """An engine gives out its blocks in the order in which they became free. The last run ends at block 0."""
    before = [cache.read(block) for block in range(BLOCKS)]
    cache.store(list(range(8, 14)), list(range(6))[::stored])
    cache.load([*range(6)], [*range(8, 14)][::loaded])
    cache.load([*range(6)][::-1], [*range(6)][::loaded])
    for i in range(6):
        kept = before[8:14][::stored]  # by slot
        assert same(cache.read(8 + i), kept[::loaded][i])
        assert same(cache.read(i), kept[::-loaded][i])


def test_stores_to_different_slots_do_not_mix(cache):
    before = [cache.read(block) for block in range(BLOCKS)]
    for block in range(BLOCKS):
        cache.store([block], [SLOTS - 1 - block])
    for block in range(BLOCKS):
        cache.wipe(block)
    cache.load([SLOTS - 1 - block for block in range(BLOCKS)], list(range(BLOCKS)))
    assert all(same(cache.read(block), before[block]) for block in range(BLOCKS))


def test_a_fenced_store_has_read_its_block_before_the_engine_writes_on(cache):
    before = cache.read(3)
    cache.copier.begin_step([])
    ticket = cache.copier.store([3], [7])
    cache.copier.begin_step([ticket])
    cache.wipe(3)
    cache.load([7], [4])
    assert same(cache.read(4), before)


def test_a_load_waits_for_the_stores_that_read_its_targets(cache):
    first, second = cache.read(1), cache.read(2)
    cache.store([2], [0])
    cache.copier.begin_step([])
    reading = cache.copier.store([1], [1])
    ticket = cache.copier.load([0], [1], [reading], When.LATER)
    ticket.wait()
    cache.load([1], [5])
    assert same(cache.read(1), second)
    assert same(cache.read(5), first)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_layer_that_never_asked_spoils_the_load(device):
    cache = Cache(packed_nhd, device)
    try:
        cache.store([1], [1])
        cache.copier.begin_step([])
        ticket = cache.copier.load([1], [2], [], When.BY_LAYER)
        cache.copier.wait_layer("layer0")
        assert not cache.copier.end_load(ticket)
        ticket.wait()
    finally:
        cache.copier.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [packed_nhd, layouts.k_and_v_apart])
def test_a_block_that_does_not_fit_is_named_and_the_others_are_kept(device, make):
    cache = Cache(make, device, pack=True)
    try:
        before = [cache.read(block) for block in range(BLOCKS)]
        for block in (3, 17):
            by_block(cache.tensors[1], BLOCKS)[block].random_(-32768, 32768)
        blocks = [9, 17, 4, 5, 6, 3, 8]
        cache.copier.begin_step([])
        ticket = cache.copier.store(blocks, list(range(20, 27)))
        ticket.wait()
        assert ticket.done()
        assert not list(ticket.bad)
        assert list(ticket.unpackable) == [1, 5]
        cache.load([20, 22, 23, 24, 26], [10, 11, 12, 13, 14])
        for block, target in zip([9, 4, 5, 6, 8], range(10, 15), strict=True):
            assert same(cache.read(target), before[block])
        cache.copier.begin_step([])
        again = cache.copier.store([9, 4], [21, 25])  # slots of blocks that did not fit
        again.wait()
        assert again.done()
        assert not list(again.unpackable)
    finally:
        cache.copier.close()


@pytest.mark.parametrize("fault", ["slow-store", "store"])
def test_an_injected_fault_does_not_hide_blocks_that_do_not_fit(fault):
    cache = Cache(packed_nhd, "cpu", pack=True)
    slab = HostSlab(SLOTS * cache.layout.slot_bytes).carve(SLOTS, cache.layout.slot_bytes)
    copier = open_copier("cpu", cache.layout, slab, 0, f"{fault}:every=1")
    try:
        by_block(cache.tensors[1], BLOCKS)[3].random_(-32768, 32768)
        ticket = copier.store([2, 3], [0, 1])
        assert type(ticket).__name__ in ("_Late", "_Spoiled")
        ticket.wait()
        assert list(ticket.unpackable) == [1]
    finally:
        copier.close()
        cache.copier.close()


def test_a_packed_block_that_is_damaged_is_not_loaded_by_a_cpu():
    """As far as its bytes show it. The tiers below host memory verify a checksum of all bytes."""
    import ctypes

    cache = Cache(packed_nhd, "cpu", pack=True)
    try:
        cache.store([1], [1])
        slab = cache.copier._slab
        codes = slab.address + slab.slot_bytes + 2048
        ctypes.memset(codes, 0xEE, 8)
        ticket = cache.copier.load([1], [2], [], When.LATER)
        ticket.wait()
        assert list(ticket.bad) == [0]
        assert "damaged" in ticket.reason
    finally:
        cache.copier.close()


def test_scribbling_destroys_just_the_blocks_named(cache):
    before = [cache.read(block) for block in range(BLOCKS)]
    cache.copier.scribble([2, 9])
    for block in range(BLOCKS):
        wanted = [torch.zeros_like(part) for part in before[block]] if block in (2, 9) else before[block]
        assert same(cache.read(block), wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("blocks", [[3], [5, 4, 17, 0]], ids=["one", "several"])
def test_the_pieces_of_blocks_are_all_of_them(layout, blocks):
    """What the copy engine is told, carried out by hand."""
    import ctypes

    from kvbm.transfer.engine_copies import Pieces

    cache = Cache(layout, "cpu")
    slab = HostSlab(SLOTS * cache.layout.slot_bytes).carve(SLOTS, cache.layout.slot_bytes)
    try:
        slots = [SLOTS - 1, 0, 7, 8][: len(blocks)]
        cache.store(blocks, slots)
        expected = [ctypes.string_at(cache.copier._slab.address + i * slab.slot_bytes, slab.slot_bytes) for i in slots]
        targets, sources, sizes = Pieces(cache.layout, slab).of(np.array(blocks), np.array(slots))
        assert len(targets) == len(sources) == len(sizes)
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)
        assert [ctypes.string_at(slab.address + i * slab.slot_bytes, slab.slot_bytes) for i in slots] == expected
    finally:
        cache.copier.close()
        slab.close()


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 3, 100], ids=lambda rows: f"{rows} rows a buffer")
@pytest.mark.parametrize("prefetched", ["not", "this", "other"])
@pytest.mark.parametrize("batch", [2, 8192], ids=lambda batch: f"{batch} indices at a time")
def test_a_load_in_bulk_is_like_any_other(device, case, rows, prefetched, batch, monkeypatch):
    from kvbm.tiers.host import slab as host
    from kvbm.transfer import kernel_copies
    from kvbm.transfer.cuda import CudaCopier

    monkeypatch.setattr(kernel_copies, "_BATCH", batch)
    cache = Cache(case[0], device, pack=case[1])
    monkeypatch.setattr(host, "_PIN_PIECE", 7 * cache.layout.slot_bytes)
    cache.copier.close()
    slab = HostSlab(SLOTS * cache.layout.slot_bytes).carve(SLOTS, cache.layout.slot_bytes)
    staging = 2 * (rows * cache.layout.block_bytes + 4096)
    cache.copier = CudaCopier(cache.layout, slab, torch.device(device), staging, bulk_bytes=0)
    try:
        before = [cache.read(block) for block in range(BLOCKS)]
        cache.store(list(range(10)), list(range(20, 30)))
        slots, blocks = [25, 21, 29, 20, 27], [11, 14, 13, 19, 12]
        if prefetched != "not":
            assert cache.copier.prefetch(slots if prefetched == "this" else [22])
        cache.load(slots, blocks, When.BY_LAYER)
        cache.load([22, 23], [15, 16], When.BY_LAYER)
        for slot, block in zip([*slots, 22, 23], [*blocks, 15, 16], strict=True):
            assert same(cache.read(block), before[slot - 20])
        neighbours = list(range(29, 19, -1))
        cache.load(neighbours, list(range(14, 24)), When.BY_LAYER)
        assert all(same(cache.read(14 + i), before[9 - i]) for i in range(10))
        for when in (When.LATER, When.NOW):
            for block in range(14, 24):
                cache.wipe(block)
            if prefetched == "this":
                assert cache.copier.prefetch(neighbours)
            cache.load(neighbours, list(range(14, 24)), when)
            assert all(same(cache.read(14 + i), before[9 - i]) for i in range(10))
        assert cache.copier.prefetch(slots)
        cache.copier.end_prefetch()
        cache.load([24], [17])
        assert same(cache.read(17), before[4])
    finally:
        cache.copier.close()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_load_in_bulk_that_breaks_says_so_and_holds_nobody_up(device, monkeypatch):
    from kvbm.transfer.cuda import CudaCopier

    cache = Cache(packed_nhd, device)
    cache.copier.close()
    slab = HostSlab(SLOTS * cache.layout.slot_bytes).carve(SLOTS, cache.layout.slot_bytes)
    cache.copier = CudaCopier(cache.layout, slab, torch.device(device), 1 << 20, bulk_bytes=0)
    try:
        cache.store([1], [1])

        def broken(*arguments):
            raise OSError("the bus is gone")

        monkeypatch.setattr(cache.copier._bulk, "_batch", broken)
        cache.copier.begin_step([])
        with pytest.raises(OSError, match="the bus is gone"):
            cache.copier.load([1], [2], [], When.BY_LAYER)
        monkeypatch.undo()
        before = cache.read(1)
        cache.load([1], [3], When.BY_LAYER)  # would wait for ever for what the first one never brought
        torch.cuda.synchronize()
        assert same(cache.read(3), before)
    finally:
        cache.copier.close()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_call_that_cuda_refuses_is_not_blamed_on_the_engine(device):
    from kvbm.transfer import cuda_calls

    stream = torch.cuda.Stream(device)
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync"):
        cuda_calls.copy_rows(0, 1, 0, 1, 2, 3, stream)
    with pytest.raises(RuntimeError, match="lower DYN_KVBM_CPU_CACHE_GB"):
        cuda_calls.pin(0, 4096)
    cuda_calls.unpin(4096)
    torch.arange(10, device=device).sum().item()
