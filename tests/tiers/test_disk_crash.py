"""An engine that dies at any moment: what its successor finds is what was written, and what was promised is found.

`make test-disk` kills 500 times; without KVBM_TEST_CRASHES it is 20.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import mmap
import os
import random
import shutil
import signal
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbm.tiers.disk import index as index_module
from kvbm.tiers.disk.cache_dir import slab_path
from kvbm.tiers.disk.file import SUMS_SUFFIX, DiskFile
from kvbm.tiers.disk.index import DATABASE, Index

CRASHES = int(os.environ.get("KVBM_TEST_CRASHES", "20"))
SLOTS = 96
SLOT = 8192
BATCH = 4
WHAT = {"model": "crash"}


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def payload_of(key: bytes, rank: int = 0) -> bytes:
    return hashlib.shake_128(key + bytes([rank])).digest(SLOT)


class Cache:
    """The disk tier as a leader and its workers use it, on one thread."""

    def __init__(self, place: Path, ranks: int = 1) -> None:
        self.index = Index.open(place, WHAT, SLOTS)
        self.files = [DiskFile(slab_path(place, rank), SLOTS, SLOT, threads=2) for rank in range(ranks)]
        self.memory = mmap.mmap(-1, SLOTS * SLOT)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def close(self) -> None:
        assert all(file.close() for file in self.files)
        self.index.close()

    def write(self, slots: list[int], keys: list[bytes]) -> None:
        """Blocks, each rank its share of them, and all of that before the leader hears of it."""
        for rank, file in enumerate(self.files):
            for at, key in enumerate(keys):
                self.memory[at * SLOT : (at + 1) * SLOT] = payload_of(key, rank)
            operation = file.write(slots, [self.address + at * SLOT for at in range(len(slots))], keys)
            assert operation.wait(30)
            assert not operation.bad
        self.index.put(list(zip(keys, slots, strict=True)))

    def good(self) -> dict[bytes, int]:
        """Everything that would be served: in the index, and its checksum fits on every rank. All of it is right."""
        entries = list(self.index.entries())
        addresses = [self.address + at * SLOT for at in range(len(entries))]
        served = dict(entries)
        for rank, file in enumerate(self.files):
            operation = file.read([slot for _, slot in entries], addresses, [key for key, _ in entries])
            assert operation.wait(30)
            bad = set(operation.bad)
            for at, (key, _) in enumerate(entries):
                if at in bad:
                    served.pop(key, None)
                else:
                    right = self.memory[at * SLOT : (at + 1) * SLOT] == payload_of(key, rank)
                    assert right, "wrong bytes were served"
        return served


def work(place: Path, ranks: int, promised: mmap.mmap, seed: int) -> None:
    """Store blocks over and over until killed.

    ``promised`` holds the number of the block of each slot that has to survive: the index has been flushed since it was
    put there, and nothing has been done to it after that. 0: none. Its last number counts the rounds.
    """
    index_module._BATCH_SECONDS = 0.005
    chance = random.Random(seed)
    cache = Cache(place, ranks)
    lying = {slot: key for key, slot in cache.index.entries()}  # least recently used first
    order = [slot for slot in range(SLOTS) if slot not in lying] + list(lying)
    numbers = dict.fromkeys(range(SLOTS), 0)
    for done in itertools.count():
        promised[-8:] = done.to_bytes(8, "little")
        slots, order = order[:BATCH], order[BATCH:]
        for slot in slots:
            promised[slot * 8 : slot * 8 + 8] = bytes(8)
        cache.index.remove([lying[slot] for slot in slots if slot in lying])
        fresh = [chance.randrange(1, 1 << 40) for _ in slots]
        keys = [key_of(number) for number in fresh]
        cache.write(slots, keys)
        lying.update(zip(slots, keys, strict=True))
        numbers.update(zip(slots, fresh, strict=True))
        order += slots
        if chance.random() < 0.3:
            assert cache.index.flush()
            for slot, number in numbers.items():
                promised[slot * 8 : slot * 8 + 8] = number.to_bytes(8, "little")


def kill_at_some_moment(place: Path, ranks: int, promised: mmap.mmap, chance: random.Random) -> None:
    seed = chance.getrandbits(64)
    child = os.fork()
    if not child:
        try:
            work(place, ranks, promised, seed)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(7)
    if chance.random() < 0.25:
        time.sleep(chance.random() * 0.03)  # while it starts
    else:
        rounds = chance.randrange(1, 60)
        while int.from_bytes(promised[-8:], "little") < rounds and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.0005)
        time.sleep(chance.random() * 0.003)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the engine died by itself"


@pytest.mark.parametrize("ranks", [1, 2])
def test_whenever_an_engine_is_killed_its_successor_finds_what_was_written_and_nothing_else(tmp_path, ranks):
    chance = random.Random(1000 + ranks)
    place = tmp_path / "cache"
    promised = mmap.mmap(-1, SLOTS * 8 + 8)
    found = kept = 0
    times = CRASHES // 2
    for _ in range(times):
        promised[:] = bytes(len(promised))
        kill_at_some_moment(place, ranks, promised, chance)
        successor = Cache(place, ranks)
        assert not successor.index.started_clean
        good = successor.good()
        for slot in range(SLOTS):
            number = int.from_bytes(promised[slot * 8 : slot * 8 + 8], "little")
            if number:
                kept += 1
                assert good.get(key_of(number)) == slot, "a block that was flushed did not survive"
        found += len(good)
        successor.close()
    # A full cache would be all slots every time; the first start is an empty one, and what was being written is lost.
    assert found >= times * SLOTS * 0.6, f"{found} of {times * SLOTS} blocks survived"
    assert kept >= times * SLOTS * 0.25, (
        f"only {kept} of {times * SLOTS} blocks were to survive: the test tests nothing"
    )


def test_writes_in_any_order_a_power_failure_may_leave_serve_nothing_wrong(tmp_path):
    """Sectors of the slab, records of the checksums and the index each as they were before or after some stores."""
    chance = random.Random(5)
    before, after, mixed = (tmp_path / name for name in ("before", "after", "mixed"))
    cache = Cache(after)
    store(cache, chance, 2 * SLOTS)
    cache.close()
    shutil.copytree(after, before)
    cache = Cache(after)
    store(cache, chance, SLOTS // 2)
    cache.close()
    served = []
    for _ in range(10):
        shutil.rmtree(mixed, ignore_errors=True)
        shutil.copytree(chance.choice([before, after]), mixed)
        for name, unit in ((slab_path(mixed, 0).name, 512), (slab_path(mixed, 0).name + SUMS_SUFFIX, 8)):
            old, new = (bytearray((place / name).read_bytes()) for place in (before, after))
            for at in range(0, len(old), unit):
                if chance.random() < 0.05:
                    new[at : at + unit] = old[at : at + unit]
            (mixed / name).write_bytes(new)
        cache = Cache(mixed)
        served.append(len(cache.good()))
        cache.close()
    assert 0 < sum(served) < 10 * SLOTS


def store(cache: Cache, chance: random.Random, blocks: int) -> None:
    for at in range(0, blocks, BATCH):
        slots = [(at + i) % SLOTS for i in range(BATCH)]
        keys = [key_of(chance.randrange(1, 1 << 40)) for _ in slots]
        cache.write(slots, keys)


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_a_thousand_flipped_bits_a_thousand_are_detected(tmp_path, ranks):
    """With two ranks the bit flips on one of them, and the block of neither is served."""
    chance = random.Random(6)
    cache = Cache(tmp_path / "cache", ranks)
    flips = 0
    while flips < 1000:
        store(cache, chance, SLOTS)
        assert len(cache.good()) == SLOTS
        with ExitStack() as stack:
            slabs = [slab_path(tmp_path / "cache", rank) for rank in range(ranks)]
            files = [stack.enter_context(slab.open("r+b")) for slab in slabs]
            for slot in range(SLOTS):
                raw = chance.choice(files)
                at = slot * SLOT + chance.randrange(SLOT)
                raw.seek(at)
                byte = raw.read(1)[0]
                raw.seek(at)
                raw.write(bytes([byte ^ 1 << chance.randrange(8)]))
                flips += 1
            for raw in files:
                raw.flush()
                os.fsync(raw.fileno())
        assert cache.good() == {}
    cache.close()


def test_a_flipped_bit_in_the_checksums_costs_the_block(tmp_path):
    place = tmp_path / "cache"
    cache = Cache(place)
    store(cache, random.Random(7), SLOTS)
    cache.close()
    sums = slab_path(place, 0).with_name(slab_path(place, 0).name + SUMS_SUFFIX)
    raw = bytearray(sums.read_bytes())
    for slot in range(SLOTS):
        raw[4096 + slot * 8 + slot % 8] ^= 1 << (slot // 8 % 8)
    sums.write_bytes(raw)
    cache = Cache(place)
    assert cache.good() == {}
    cache.close()


@pytest.mark.parametrize("name", [DATABASE, f"{DATABASE}-wal", "rank-0.slab", "rank-0.slab.sums", "cache.json"])
@pytest.mark.parametrize("damage", ["truncated", "removed", "garbage", "empty"])
def test_whatever_happens_to_a_file_the_next_engine_starts_and_serves_nothing_wrong(tmp_path, name, damage):
    place = tmp_path / "cache"
    if (child := os.fork()) == 0:
        cache = Cache(place)
        store(cache, random.Random(8), SLOTS)
        cache.index.flush()
        os.kill(os.getpid(), signal.SIGKILL)  # so that the log of the index is still there
    os.waitpid(child, 0)
    file = place / name
    size = file.stat().st_size
    assert size
    if damage == "removed":
        file.unlink()
    else:
        os.truncate(file, size // 3 if damage == "truncated" else 0)
    if damage == "garbage":
        file.write_bytes(random.Random(9).randbytes(size))
    cache = Cache(place)
    before = len(cache.good())
    store(cache, random.Random(10), SLOTS)
    assert len(cache.good()) == SLOTS
    cache.close()
    # The log of the index may hold all of it once more.
    assert before < SLOTS or name == DATABASE
