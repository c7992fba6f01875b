"""Host memory that outlives the engine: what was kept is there again, everything else is noticed."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import random
import signal
import stat
import threading
import time
from pathlib import Path

import pytest

from kvbm.tiers import bounded
from kvbm.tiers.disk import file as disk
from kvbm.tiers.disk import inspect as caches
from kvbm.tiers.disk.cache_dir import slab_path
from kvbm.tiers.disk.file import DiskSpaceError
from kvbm.tiers.disk.index import Index
from kvbm.tiers.host import persistent_slab as kept
from kvbm.tiers.host.persistent_slab import PersistentSlab
from kvbm.tiers.host.slab import HostMemoryError
from kvbm.tiers.lock import CacheInUse

SLOT = 8192
SLOTS = 64


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def payload_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(SLOT)


def write(slab: PersistentSlab, slot: int, data: bytes) -> None:
    ctypes.memmove(slab.address + slot * SLOT, data, len(data))


def keep(slab: PersistentSlab, slots: list[int], keys: list[bytes]) -> None:
    hashes = slab.hash(slots, keys)
    assert hashes.wait(60)
    assert hashes.bad == []
    slab.record(hashes)


def fill(slab: PersistentSlab, blocks: dict[int, int]) -> None:
    """``blocks``: slot -> number of the block."""
    for slot, number in blocks.items():
        write(slab, slot, payload_of(key_of(number)))
    keep(slab, list(blocks), [key_of(number) for number in blocks.values()])


def good(slab: PersistentSlab, blocks: dict[int, int]) -> dict[int, int]:
    """Those whose checksum fits; all of them are right."""
    operation = slab.check(list(blocks), [key_of(number) for number in blocks.values()])
    assert operation.wait(60)
    assert bool(operation.bad) == bool(operation.reason)
    served = {slot: blocks[slot] for at, slot in enumerate(blocks) if at not in set(operation.bad)}
    for slot, number in served.items():
        assert ctypes.string_at(slab.address + slot * SLOT, SLOT) == payload_of(key_of(number))
    return served


def open_slab(path: Path, slots: int = SLOTS) -> PersistentSlab:
    slab = PersistentSlab(path, slots, SLOT)
    slab.carve(slots, SLOT)
    return slab


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.slab"


BLOCKS = {slot: 1000 + slot for slot in range(SLOTS)}


def test_what_was_kept_is_there_for_the_next_process(path):
    slab = open_slab(path)
    assert slab.kept == 0
    fill(slab, BLOCKS)
    slab.close()
    slab = open_slab(path)
    assert slab.kept == SLOTS
    assert good(slab, BLOCKS) == BLOCKS
    slab.close()


def test_what_was_not_kept_is_not_served(path):
    slab = open_slab(path)
    fill(slab, {0: 1, 1: 2})
    write(slab, 2, payload_of(key_of(3)))  # complete, but nobody said so
    write(slab, 1, payload_of(key_of(4))[:100])  # the beginning of the next block in a slot that was kept
    slab.close()
    slab = open_slab(path)
    assert good(slab, {0: 1, 1: 2, 2: 3}) == {0: 1}
    assert good(slab, {1: 4}) == {}
    slab.close()


def test_a_slot_answers_only_to_the_block_that_was_kept_last(path):
    slab = open_slab(path)
    fill(slab, {5: 1})
    fill(slab, {5: 2})
    assert good(slab, {5: 1}) == {}
    assert good(slab, {5: 2}) == {5: 2}
    slab.close()


def test_a_flipped_bit_costs_one_block(path):
    slab = open_slab(path)
    fill(slab, BLOCKS)
    chance = random.Random(1)
    for slot in range(SLOTS):
        place = ctypes.c_uint8.from_address(slab.address + slot * SLOT + chance.randrange(SLOT))
        bit = 1 << chance.randrange(8)
        place.value ^= bit
        assert good(slab, BLOCKS) == {other: number for other, number in BLOCKS.items() if other != slot}
        place.value ^= bit
    slab.close()


@pytest.mark.parametrize("slots", [16, 600])
def test_a_slab_of_another_size_keeps_what_it_has_room_for(path, slots):
    slab = open_slab(path)
    fill(slab, BLOCKS)
    slab.close()
    slab = open_slab(path, slots)
    kept_blocks = {slot: number for slot, number in BLOCKS.items() if slot < slots}
    assert slab.kept == len(kept_blocks)
    assert good(slab, kept_blocks) == kept_blocks
    fill(slab, {slots - 1: 7})
    slab.close()


@pytest.mark.parametrize("gone", ["", ".sums"])
def test_a_removed_file_starts_clean(path, gone):
    slab = open_slab(path)
    fill(slab, BLOCKS)
    slab.close()
    os.remove(f"{path}{gone}")
    slab = open_slab(path)
    assert slab.kept == 0
    assert good(slab, BLOCKS) == {}
    slab.close()


def test_it_is_private_and_taken_by_one_process_at_a_time(path):
    slab = open_slab(path)
    for name in (path, f"{path}.sums"):
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
    with pytest.raises(CacheInUse):
        PersistentSlab(path, SLOTS, SLOT)
    slab.close()
    open_slab(path).close()


def test_every_page_is_there_before_the_first_block_comes(path):
    slab = open_slab(path)
    assert path.stat().st_blocks * 512 >= SLOTS * SLOT
    slab.close()


def test_more_than_there_is_is_refused(path, monkeypatch):
    with pytest.raises(HostMemoryError, match="DYN_KVBM_CPU_CACHE_GB"):
        PersistentSlab(path, 1 << 40, SLOT)
    monkeypatch.setattr(kept, "refuse_if_too_large", lambda size: None)
    with pytest.raises(DiskSpaceError, match=r"DYN_KVBM_CPU_CACHE_GB asks for .*mount -o remount"):
        PersistentSlab(path, 1 << 40, SLOT)
    open_slab(path).close()


def test_a_slot_outside_of_the_slab_is_bad(path):
    slab = open_slab(path)
    operation = slab.hash([0, SLOTS, -1], [b"a", b"b", b"c"])
    assert operation.wait(60)
    assert operation.bad == [1, 2]
    assert "outside" in operation.reason
    slab.close()


def test_nothing_is_done_at_once(path):
    slab = open_slab(path)
    assert slab.check([], []).wait(60)
    slab.close()


def test_the_command_line_sees_it_like_a_cache_on_disk(tmp_path):
    place = tmp_path / "kvbm-some-model-1"
    index = Index.open(place, {"model": "some-model"}, SLOTS)
    slab = open_slab(slab_path(place, 0))
    fill(slab, BLOCKS)
    index.put([(key_of(number), slot) for slot, number in BLOCKS.items()])
    index.flush()
    assert caches.describe(place).blocks == SLOTS
    assert caches.verify(place, lambda done, total: None)[0].good == SLOTS
    with pytest.raises(CacheInUse):
        caches.clear(place)
    slab.close()
    index.close()
    caches.clear(place)
    assert not place.exists()


def work(place: Path, promised: mmap.mmap, seed: int) -> None:
    """Store blocks over and over until killed; ``promised`` has the blocks of all slots that must survive."""
    chance = random.Random(seed)
    index = Index.open(place, {"model": "crash"}, SLOTS)
    slab = open_slab(slab_path(place, 0))
    held = {slot: key for key, slot in index.entries()}
    numbers = dict.fromkeys(range(SLOTS), 0)
    while True:
        slot, number = chance.randrange(SLOTS), chance.randrange(1, 1 << 40)
        promised[slot * 8 : slot * 8 + 8] = bytes(8)
        index.remove([held[slot]] if slot in held else [])
        key = held[slot] = key_of(number)
        write(slab, slot, payload_of(key))
        keep(slab, [slot], [key])
        index.put([(key, slot)])
        numbers[slot] = number
        if chance.random() < 0.1:
            assert index.flush()
            for other, known in numbers.items():
                promised[other * 8 : other * 8 + 8] = known.to_bytes(8, "little")


def test_whenever_an_engine_is_killed_its_successor_finds_what_was_kept_and_nothing_else(tmp_path):
    chance = random.Random(3)
    place = tmp_path / "cache"
    found = expected = 0
    for _ in range(12):
        promised = mmap.mmap(-1, SLOTS * 8)
        seed = chance.getrandbits(64)
        child = os.fork()
        if not child:
            try:
                work(place, promised, seed)
            finally:
                os._exit(7)
        deadline = time.monotonic() + chance.choice([0.01, 30])
        while time.monotonic() < deadline and promised[:].count(0) > SLOTS * 8 * 0.9:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        index = Index.open(place, {"model": "crash"}, SLOTS)
        slab = open_slab(slab_path(place, 0))
        entries = list(index.entries())
        operation = slab.check([slot for _, slot in entries], [key for key, _ in entries])
        assert operation.wait(60)
        served = {key: slot for at, (key, slot) in enumerate(entries) if at not in operation.bad}
        for key, slot in served.items():
            assert ctypes.string_at(slab.address + slot * SLOT, SLOT) == payload_of(key)
        for slot in range(SLOTS):
            if number := int.from_bytes(promised[slot * 8 : slot * 8 + 8], "little"):
                expected += 1
                assert served.get(key_of(number)) == slot
        found += len(served)
        slab.close()
        index.close()
    assert expected > 0
    assert found >= 4 * SLOTS


def test_a_slab_that_is_given_up_while_a_page_does_not_come_stays_mapped(path, monkeypatch):
    """A thread still reads it: without the mapping, or with a truncated file, that would kill the process."""
    monkeypatch.setattr(bounded, "DISK_END_SECONDS", 0.2)
    slab = open_slab(path)
    begun, gate = threading.Event(), threading.Event()

    def read(position, slot, tag):
        begun.set()
        gate.wait(60)
        ctypes.string_at(slab.address, SLOT)

    operation = disk.Operation("check", [0], [0], [key_of(0)], SLOT)
    slab._begin(operation, read)
    assert begun.wait(60)
    slab.give_up()
    gate.set()
    assert operation.wait(60)
    assert not operation.bad
    assert path.stat().st_size
