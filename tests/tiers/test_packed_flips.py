"""A packed block on disk: a bit that flips anywhere in its slot costs the block, and the engine never sees it."""

from __future__ import annotations

import os
import random
import time

import pytest
import torch

from kvbm import config as settings
from kvbm.plans import Copy, LoadPlan, MovePlan, StepPlan, StorePlan
from kvbm.runtime.rank import Rank
from kvbm.tiers.disk.cache_dir import slab_path
from kvbm.transfer.packing import GROUP, Tile
from tiernames import DISK, HOST

SLOT = 3  # on disk, of the block that is damaged
TAG = b"a packed block"
SIZE = 4096  # values of a tile
TILES = 4


class PackedRank:
    def __init__(self, folder):
        torch.manual_seed(2)
        self.cache = torch.randn(8, TILES, SIZE).to(torch.bfloat16)
        self.cache[0, :, ::97] *= 2.0**-40  # escapes, in half of the room that there is for them
        self.block = self.cache[0].clone()
        values = {
            "cpu_cache_override_num_blocks": 4, "disk_cache_override_num_blocks": 8, "disk_cache_dir": str(folder),
            "disk_load_timeout_secs": 60, "pack": "on",
        }  # fmt: skip
        config = settings.load(extra=values, environ={}, files=[])
        self.rank = Rank(config, 0, 1, cache={"model": "m"})
        self.rank.register({f"layer {i}": self.cache[:, i] for i in range(TILES)}, 8)
        (disk,) = (tier for tier in self.rank.open().tiers if tier.name == DISK)
        self.path = slab_path(folder / disk.store, 0)
        (stored,) = self.run(StepPlan(stores=[StorePlan(1, Copy(HOST, [0], [0]))]), "stores")
        assert stored.ok
        assert not stored.unpackable
        (moved,) = self.run(StepPlan(moves=[MovePlan(2, HOST, DISK, [0], [SLOT], [TAG])]), "moves")
        assert not moved.bad

    def run(self, plan, kind):
        worker = self.rank.worker
        worker.begin(plan)
        worker.start_loads(plan)
        worker.start_stores(plan)
        deadline = time.monotonic() + 60
        while not (found := getattr(worker.poll().report, kind)):
            assert time.monotonic() < deadline
        return found

    def load(self):
        """The positions that the worker calls bad, and whether the engine's block is the one that was stored."""
        self.cache[5] = 0
        plan = LoadPlan(7, "r", [Copy(DISK, [SLOT], [5], [1], [TAG])], in_step=False)
        (result,) = self.run(StepPlan(loads=[plan]), "loads")
        return result.bad, torch.equal(self.cache[5], self.block), not self.cache[5].any()

    def flip(self, at, bit):
        fd = os.open(self.path, os.O_RDWR)
        try:
            at += SLOT * self.rank.layout.slot_bytes
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << bit]), at)
            os.fsync(fd)
        finally:
            os.close(fd)


@pytest.fixture
def packed(tmp_path):
    rank = PackedRank(tmp_path)
    yield rank
    rank.rank.close()


def test_a_flipped_bit_anywhere_in_a_packed_slot_is_noticed_before_use(packed):
    tile, layout = Tile(SIZE), packed.rank.layout
    assert layout.tile_values == SIZE
    assert layout.slot_bytes > layout.block_bytes == TILES * tile.size
    low, high = 43, 55  # escapes of a tile: one for each 97 values, and few others
    parts = {
        "signs and mantissas": (0, tile.values),
        "codes": (tile.values, tile.bases),
        "first bases": (tile.bases, tile.bases + SIZE // GROUP),
        "second bases": (tile.second_bases, tile.count),
        "count": (tile.count, tile.escapes),
        "escapes": (tile.escapes, tile.escapes + low),
        "room for escapes": (tile.escapes + high, tile.size),
    }
    chance = random.Random(4)
    places = [
        (number * tile.size + chance.randrange(*span), chance.randrange(8))
        for span in parts.values() for number in range(TILES) for _ in range(4)
    ]  # fmt: skip
    places += [(chance.randrange(layout.block_bytes, layout.slot_bytes), chance.randrange(8)) for _ in range(4)]
    assert packed.load() == ([], True, False)
    with open(packed.path, "rb") as file:
        file.seek(SLOT * layout.slot_bytes + tile.count)
        assert low <= file.read(1)[0] < high < tile.room
    for at, bit in places:
        packed.flip(at, bit)
        assert packed.load() == ([0], False, True), (at, bit)
        packed.flip(at, bit)
    assert packed.load() == ([], True, False)
