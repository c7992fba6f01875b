"""Every byte of ten thousand random blocks comes back, by every way there is, compared on the device itself.

The test never waits where an engine would not: blocks are overwritten behind a fence while their store may still run,
and read right after a load as attention would, so that a missing wait between streams shows as wrong bytes.
"""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from devices import ON_CUDA  # noqa: E402

import layouts  # noqa: E402
from kvbm.tiers.host.slab import HostSlab  # noqa: E402
from kvbm.transfer import open_copier  # noqa: E402
from kvbm.transfer.base import When  # noqa: E402

pytestmark = pytest.mark.gpu

MOVED = 10_000 if ON_CUDA else 1_000
BLOCKS = MOVED * 6 // 5  # so that some are to stay as they are
SLOTS = MOVED * 11 // 10
HEADS = 8 if ON_CUDA else 2
STAGING = 64 << 20  # many times less than there is to move
MANY_TOKENS = 100_000  # too much to compute for a load in bulk
LONG = MOVED // 10  # blocks, from which on a load is one in bulk

# All that differ in how blocks are found; test_copiers.py has the rest. Stores take the copy engine only where pieces
# are of 16 KiB or more.
CASES = [
    (layouts.packed_nhd, "kernel"), (layouts.packed_nhd, "engine"), (layouts.k_and_v_apart, "kernel"),
    (layouts.mla, "kernel"), (layouts.mla, "engine"), (layouts.cross_layer, "kernel"), (layouts.cross_layer, "engine"),
    (layouts.head_outside, "kernel"), (layouts.unequal_layers, "kernel"),
]  # fmt: skip


class Cache:
    def __init__(self, make, device, stores):
        self.tensors = make(device, BLOCKS, HEADS)
        self.layout = layouts.layout_of(self.tensors, BLOCKS)
        slab = HostSlab(SLOTS * self.layout.slot_bytes).carve(SLOTS, self.layout.slot_bytes)
        if ON_CUDA:
            from kvbm.transfer.cuda import CudaCopier

            bulk = LONG * self.layout.block_bytes
            self.copier = CudaCopier(self.layout, slab, torch.device(device), STAGING, stores, bulk)
        else:
            self.copier = open_copier(device, self.layout, slab, 0)
        self.blocks = [layouts.by_block(tensor, BLOCKS) for tensor in self.tensors]
        self.device = device

    def fill(self):
        """Random bits everywhere; returns a copy of them."""
        for block in self.blocks:
            smallest, largest = torch.iinfo(block.dtype).min, torch.iinfo(block.dtype).max
            block.random_(smallest, largest + 1)
        return [block.clone() for block in self.blocks]

    def store(self, blocks, slots, sizes):
        """Returns when what is submitted now may overwrite the blocks, not when they have been read."""
        self.copier.begin_step([])
        tickets = [self.copier.store(blocks[part], slots[part]) for part in parts(sizes)]
        self.copier.begin_step(tickets)
        return tickets

    def load(self, slots, blocks, sizes, way):
        """Returns when the engine may read the blocks, not when they are there."""
        when = {"later": When.LATER, "now": When.NOW}.get(way, When.BY_LAYER)
        tokens = MANY_TOKENS if way == "by layer" else 1
        tickets = []
        for part in parts(sizes):
            if way == "in bulk, fetched ahead":
                assert self.copier.prefetch(slots[part], tokens) is (ON_CUDA and len(slots[part]) >= LONG)
            self.copier.begin_step([])
            ticket = self.copier.load(slots[part], blocks[part], [], when, tokens)
            if when is When.LATER:
                ticket.wait()
            elif when is When.BY_LAYER:
                for layer in self.layout.layers:
                    self.copier.wait_layer(layer)
                assert self.copier.end_load(ticket)
            tickets.append(ticket)
        return tickets


def parts(sizes):
    start = 0
    for size in sizes:
        yield slice(start, start + size)
        start += size


def cut(total, source):
    """Random sizes, small and large, that come to ``total``."""
    sizes = [4 * LONG, 1, 7]
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, source.choice((1, 50, LONG // 2, 2 * LONG)) * source.randrange(1, 3)))
    source.shuffle(sizes)
    return sizes


def over(tickets):
    for ticket in tickets:
        ticket.wait()
        assert ticket.done()
        assert not list(ticket.bad), ticket.reason


@pytest.mark.parametrize(("layout", "stores"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_every_byte_of_ten_thousand_blocks_comes_back(device, layout, stores, stream):
    source = random.Random(f"{layout.__name__} {stores}")
    with stream:
        cache = Cache(layout, device, stores)
        try:
            if stores == "engine" and ON_CUDA:
                assert "copy engine stores" in cache.copier.name
            for way in ("later", "now", "by layer", "in bulk", "in bulk, fetched ahead"):
                blocks, targets = (source.sample(range(BLOCKS), MOVED) for _ in range(2))
                slots = source.sample(range(SLOTS), MOVED)
                before = cache.fill()
                stored = cache.store(blocks, slots, cut(MOVED, source))
                wanted = cache.fill()
                for old, new in zip(before, wanted, strict=True):
                    new[torch.tensor(targets, device=device)] = old[torch.tensor(blocks, device=device)]
                over(stored)  # only then is a slot ever loaded
                loaded = cache.load(slots, targets, cut(MOVED, source), way)
                same = [torch.equal(now, then) for now, then in zip(cache.blocks, wanted, strict=True)]
                assert all(same), f"{way}: layers {[i for i, layer in enumerate(same) if not layer]} differ"
                over(loaded)
        finally:
            cache.copier.close()
