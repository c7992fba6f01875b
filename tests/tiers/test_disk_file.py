"""The disk tier's file: what was written comes back or is reported, never anything else."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import random
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from kvbm.testing.disk_faults import disk_io
from kvbm.tiers.disk import prealloc
from kvbm.tiers.disk.file import DiskFile, DiskSpaceError, FileIO
from kvbm.tiers.lock import CacheInUse

SLOT = 8192


class Memory:
    """Page-aligned memory of some slots."""

    def __init__(self, slots: int, slot_bytes: int = SLOT) -> None:
        self.map = mmap.mmap(-1, slots * slot_bytes)
        self.size = slot_bytes
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def address(self, slot: int) -> int:
        return self.start + slot * self.size

    def addresses(self, count: int) -> list[int]:
        return [self.address(i) for i in range(count)]

    def __getitem__(self, slot: int) -> bytes:
        return self.map[slot * self.size : (slot + 1) * self.size]

    def __setitem__(self, slot: int, value: bytes) -> None:
        self.map[slot * self.size : (slot + 1) * self.size] = value


def tag(i: int) -> bytes:
    return i.to_bytes(32, "little")


def payload(i: int, size: int = SLOT) -> bytes:
    return random.Random(i).randbytes(size)


def fill(file: DiskFile, slots: list[int], tags: list[int]) -> None:
    memory = Memory(len(slots), file.slot_bytes)
    for i, number in enumerate(tags):
        memory[i] = payload(number, file.slot_bytes)
    operation = file.write(slots, memory.addresses(len(slots)), [tag(number) for number in tags])
    assert operation.wait(60)
    assert operation.bad == []


def check(file: DiskFile, slots: list[int], tags: list[int]) -> list[int]:
    """Positions that are bad; all others are what was written."""
    memory = Memory(len(slots), file.slot_bytes)
    operation = file.read(slots, memory.addresses(len(slots)), [tag(number) for number in tags])
    assert operation.wait(60)
    assert operation.bytes == len(slots) * file.slot_bytes
    for i, number in enumerate(tags):
        assert i in operation.bad or memory[i] == payload(number, file.slot_bytes)
    assert bool(operation.bad) == bool(operation.reason)
    return operation.bad


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.slab"


@pytest.mark.parametrize("how", [{}, {"allocator": "open-direct"}, {"direct": False}, {"threads": 1}])
def test_what_was_written_comes_back_in_any_order(path, how):
    file = DiskFile(path, 64, SLOT, **how)
    slots = random.Random(1).sample(range(64), 50)
    fill(file, slots, slots)
    again = random.Random(2).sample(slots, 50)
    assert check(file, again, again) == []
    assert file.close()


@pytest.mark.parametrize(
    ("how", "direct"), [({}, True), ({"allocator": "open-direct"}, True), ({"direct": False}, False)]
)
def test_o_direct_is_in_force_when_asked_for(path, how, direct):
    import fcntl

    file = DiskFile(path, 4, SLOT, **how)
    assert bool(fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT) == direct
    file.close()


def test_it_is_still_there_after_it_was_opened_again(path):
    file = DiskFile(path, 16, SLOT)
    assert file.kept == 0
    fill(file, [3, 4, 5, 9], [3, 4, 5, 9])
    file.close()
    file = DiskFile(path, 16, SLOT)
    assert file.kept == 4
    assert check(file, [9, 3, 4, 5], [9, 3, 4, 5]) == []
    file.close()


@pytest.mark.parametrize("slots", [8, 16, 40])
def test_a_slab_that_grows_or_shrinks_keeps_what_it_has_room_for(path, slots):
    file = DiskFile(path, 16, SLOT)
    fill(file, list(range(16)), list(range(16)))
    file.close()
    file = DiskFile(path, slots, SLOT)
    kept = list(range(min(slots, 16)))
    assert file.kept == len(kept)
    assert check(file, kept, kept) == []
    assert path.stat().st_size == slots * SLOT
    fill(file, [slots - 1], [99])
    assert check(file, [slots - 1], [99]) == []
    file.close()


def test_what_was_cut_off_does_not_come_back_when_the_slab_grows_again(path):
    for slots in (16, 8, 16):
        file = DiskFile(path, slots, SLOT)
        if slots == 16 and not file.kept:
            fill(file, list(range(16)), list(range(16)))
        file.close()
    file = DiskFile(path, 16, SLOT)
    assert file.kept == 8
    assert check(file, list(range(16)), list(range(16))) == list(range(8, 16))
    file.close()


def test_slots_of_another_size_are_forgotten(path, caplog):
    file = DiskFile(path, 16, SLOT)
    fill(file, list(range(16)), list(range(16)))
    file.close()
    file = DiskFile(path, 16, 2 * SLOT)
    assert file.kept == 0
    assert "starting clean" in caplog.text
    assert check(file, [0, 1], [0, 1]) == [0, 1]
    file.close()


def test_a_slot_answers_only_to_the_block_that_was_written_last(path):
    file = DiskFile(path, 4, SLOT)
    fill(file, [1], [1])
    fill(file, [1], [2])
    assert check(file, [1], [1]) == [0]
    assert check(file, [1], [2]) == []
    file.close()


def test_the_same_bytes_under_another_tag_are_not_served(path):
    file = DiskFile(path, 4, SLOT)
    memory = Memory(1)
    memory[0] = payload(1)
    file.write([0], memory.addresses(1), [tag(1)]).wait(60)
    assert file.read([0], memory.addresses(1), [tag(1)]).wait(60)
    operation = file.read([0], memory.addresses(1), [tag(2)])
    operation.wait(60)
    assert operation.bad == [0]
    assert operation.reason == "checksum mismatch"
    file.close()


def test_a_slot_that_was_never_written_is_bad(path):
    file = DiskFile(path, 4, SLOT)
    assert check(file, [0, 3], [0, 3]) == [0, 1]
    file.close()


def test_one_flipped_bit_costs_one_block(path):
    file = DiskFile(path, 64, SLOT, direct=False)
    slots = list(range(64))
    fill(file, slots, slots)
    with open(path, "r+b") as raw:
        raw.seek(17 * SLOT + 4711)
        byte = raw.read(1)[0]
        raw.seek(17 * SLOT + 4711)
        raw.write(bytes([byte ^ 0x10]))
    assert check(file, slots, slots) == [17]
    file.close()


def test_a_truncated_file_costs_the_blocks_that_are_gone(path, caplog):
    file = DiskFile(path, 16, SLOT)
    slots = list(range(16))
    fill(file, slots, slots)
    os.truncate(path, 5 * SLOT + 100)
    assert check(file, slots, slots) == list(range(5, 16))
    fill(file, [9], [9])
    assert check(file, [9], [9]) == []
    os.truncate(path, 5 * SLOT + 100)
    file.close()
    file = DiskFile(path, 16, SLOT)
    assert "truncated or removed" in caplog.text
    assert file.kept == 5
    assert check(file, slots, slots) == list(range(5, 16))
    file.close()


@pytest.mark.parametrize("gone", ["", ".sums"])
def test_a_removed_file_starts_clean(path, gone):
    file = DiskFile(path, 16, SLOT)
    fill(file, list(range(16)), list(range(16)))
    file.close()
    os.remove(f"{path}{gone}")
    file = DiskFile(path, 16, SLOT)
    assert file.kept == 0
    assert check(file, [0, 1], [0, 1]) == [0, 1]
    fill(file, [0], [0])
    assert check(file, [0], [0]) == []
    file.close()


def test_nobody_else_can_read_the_files(path):
    os.umask(old := os.umask(0))
    file = DiskFile(path, 4, SLOT)
    for name in (path, f"{path}.sums"):
        assert stat.S_IMODE(os.stat(name).st_mode) == 0o600
    file.close()
    os.umask(old)


def test_a_second_owner_is_turned_away_until_the_first_has_gone(path):
    file = DiskFile(path, 4, SLOT)
    with pytest.raises(CacheInUse, match="in use by another engine"):
        DiskFile(path, 4, SLOT)
    threading.Timer(0.3, file.close).start()
    DiskFile(path, 4, SLOT, patience=60).close()


def test_a_forked_child_does_not_keep_the_file_locked(path):
    file = DiskFile(path, 4, SLOT)
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(to_parent[1], b"x")
        os.read(to_child[0], 1)
        os._exit(0)
    try:
        os.read(to_parent[0], 1)
        file.close()
        DiskFile(path, 4, SLOT).close()
    finally:
        os.write(to_child[1], b"x")
        os.waitpid(child, 0)
        for fd in (*to_child, *to_parent):
            os.close(fd)


def test_more_than_the_disk_has_is_refused_with_the_figure_that_would_fit(path):
    with pytest.raises(DiskSpaceError) as refused:
        DiskFile(path, 1 << 40, 1 << 20)
    text = str(refused.value)
    assert "DYN_KVBM_DISK_CACHE_GB asks for 1152921504.61 GB" in text
    assert "GB are free" in text
    assert "would fit" in text
    assert "`kvbm cache clear`" in text
    assert path.stat().st_size == 0
    DiskFile(path, 4, SLOT).close()


def test_a_disk_that_is_full_now_and_could_hold_it_is_no_reason_to_refuse(path, monkeypatch):
    """Whoever can go on without it does: :class:`DiskSpaceError` is for what can never be."""
    real = os.statvfs(path.parent)
    found = type("Full", (), {"f_bavail": 1, "f_frsize": real.f_frsize, "f_blocks": real.f_blocks})
    with monkeypatch.context() as full:
        full.setattr("kvbm.tiers.disk.prealloc.os.fstatvfs", lambda fd: found)
        with pytest.raises(OSError, match="GB are free") as refused:
            DiskFile(path, 64, SLOT)
    assert not isinstance(refused.value, DiskSpaceError)
    DiskFile(path, 64, SLOT).close()


def test_the_disk_space_is_taken_at_the_start(path):
    DiskFile(path, 1000, SLOT).close()
    assert path.stat().st_blocks * 512 >= 1000 * SLOT


@pytest.mark.parametrize("zerofill", [False, True])
def test_without_preallocation_the_file_is_filled_or_sparse_with_a_warning(path, monkeypatch, caplog, zerofill):
    import errno

    monkeypatch.setattr(prealloc, "fallocate", lambda fd, at, size: errno.EOPNOTSUPP)
    file = DiskFile(path, 1000, SLOT, zerofill=zerofill)
    assert path.stat().st_size == 1000 * SLOT
    assert (path.stat().st_blocks * 512 >= 1000 * SLOT) == zerofill
    assert ("DYN_KVBM_DISK_ZEROFILL_FALLBACK" in caplog.text) != zerofill
    fill(file, [0, 999], [0, 999])
    assert check(file, [0, 999], [0, 999]) == []
    file.close()


@pytest.mark.parametrize("how", ["default", "open-direct"])
def test_without_o_direct_it_goes_through_the_page_cache_and_says_so(path, monkeypatch, caplog, how):
    real_open, real_fcntl = os.open, prealloc.fcntl.fcntl

    def no_open(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "no O_DIRECT here")
        return real_open(path, flags, *rest)

    def no_fcntl(fd, command, value=0):
        if command == prealloc.fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(22, "no O_DIRECT here")
        return real_fcntl(fd, command, value)

    monkeypatch.setattr(prealloc.os, "open", no_open)
    monkeypatch.setattr(prealloc.fcntl, "fcntl", no_fcntl)
    file = DiskFile(path, 4, SLOT, allocator=how)
    assert "going through the page cache" in caplog.text
    fill(file, [0], [0])
    assert check(file, [0], [0]) == []
    file.close()


@pytest.mark.parametrize("how", ["default", "open-direct"])
def test_a_filesystem_that_takes_o_direct_and_then_refuses_the_slots_is_found_out(path, monkeypatch, caplog, how):
    import fcntl

    real = os.preadv

    def picky(fd, buffers, offset):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "slots must be multiples of 64 KiB")
        return real(fd, buffers, offset)

    monkeypatch.setattr(prealloc.os, "preadv", picky)
    file = DiskFile(path, 4, SLOT, allocator=how)
    assert "no O_DIRECT" in caplog.text
    fill(file, [0], [0])
    assert check(file, [0], [0]) == []
    file.close()


def test_progress_is_logged_while_the_file_gets_its_size(path, monkeypatch, caplog):
    monkeypatch.setattr(prealloc, "_PIECE", SLOT)
    now = iter(range(1000))
    monkeypatch.setattr(prealloc.time, "monotonic", lambda: float(next(now)))
    caplog.set_level(logging.INFO, "kvbm")
    DiskFile(path, 8, SLOT).close()
    assert caplog.text.count("GB allocated") >= 2
    assert "ready in" in caplog.text


@pytest.mark.parametrize("kind", ["disk-read", "disk-read:errno=ENOSPC", "disk-flip"])
def test_a_read_that_fails_costs_its_blocks_and_says_why(path, kind):
    DiskFile(path, 16, SLOT).close()
    file = DiskFile(path, 16, SLOT, io=disk_io(kind, rank=0))
    fill(file, list(range(16)), list(range(16)))
    memory = Memory(16)
    operation = file.read(list(range(16)), memory.addresses(16), [tag(i) for i in range(16)])
    assert operation.wait(60)
    expected = {"disk-read": "EIO", "disk-read:errno=ENOSPC": "ENOSPC", "disk-flip": "checksum mismatch"}[kind]
    assert operation.reason.startswith(expected)
    assert operation.bad == ([0] if kind == "disk-flip" else list(range(16)))
    file.close()


def test_one_bad_sector_costs_one_block(path):
    class Bad(FileIO):
        def read(self, fd, buffers, offset):
            if offset <= 7 * SLOT < offset + len(buffers) * SLOT:
                raise OSError(5, "bad sector")
            return super().read(fd, buffers, offset)

    file = DiskFile(path, 16, SLOT, io=Bad())
    fill(file, list(range(16)), list(range(16)))
    assert check(file, list(range(16)), list(range(16))) == [7]
    file.close()


@pytest.mark.parametrize("kind", ["disk-write", "disk-write:errno=EIO"])
def test_a_write_that_fails_is_reported_and_leaves_nothing_to_be_found(path, kind):
    file = DiskFile(path, 16, SLOT, io=disk_io(kind, rank=0))
    memory = Memory(4)
    operation = file.write([0, 1, 2, 9], memory.addresses(4), [tag(i) for i in range(4)])
    assert operation.wait(60)
    assert operation.bad == [0, 1, 2, 3]
    assert operation.reason.startswith("EIO" if "EIO" in kind else "ENOSPC")
    assert check(file, [0, 1, 2, 9], [0, 1, 2, 3]) == [0, 1, 2, 3]
    file.close()


def test_a_torn_write_that_claims_success_is_seen_when_it_is_read(path):
    file = DiskFile(path, 4, SLOT, io=disk_io("disk-torn", rank=0))
    fill(file, [2], [2])
    assert check(file, [2], [2]) == [0]
    file.close()


def test_a_stalled_write_does_not_hold_up_a_read(path, stall):
    file = DiskFile(path, 64, SLOT, io=disk_io("disk-slow-write", rank=0))
    memory = Memory(64)
    writes = [file.write([i], [memory.address(i)], [tag(i)]) for i in range(20)]
    assert stall.begun.wait(60)
    assert check(file, [63], [63]) == [0]
    assert not any(write.done() for write in writes)
    stall.over.set()
    file.close()


def test_what_nobody_waits_for_any_more_is_not_read(path, stall):
    file = DiskFile(path, 64, SLOT, threads=1, io=disk_io("disk-slow-read", rank=0))
    fill(file, list(range(64)), list(range(64)))
    memory = Memory(64)
    reads = [file.read([i], [memory.address(i)], [tag(i)]) for i in range(64)]
    assert stall.begun.wait(60)
    for read in reads:
        read.cancel()
    stall.over.set()
    assert reads[-1].wait(60)
    assert reads[-1].bad == [0]
    assert "cancelled" in reads[-1].reason
    assert check(file, [63], [63]) == []
    file.close()


def test_after_it_was_closed_everything_fails_and_nothing_hangs(path):
    file = DiskFile(path, 64, SLOT, threads=1, io=disk_io("disk-slow-write:seconds=0.05", rank=0))
    memory = Memory(64)
    writes = [file.write([i], [memory.address(i)], [tag(i)]) for i in range(20)]
    assert file.close()
    late = file.read([0], [memory.address(0)], [tag(0)])
    for operation in [*writes, late]:
        assert operation.wait(60)
    assert writes[-1].bad == late.bad == [0]
    assert "closed" in late.reason


def test_a_disk_that_hangs_is_left_behind(path, stall):
    file = DiskFile(path, 4, SLOT, io=disk_io("disk-slow-write", rank=0))
    memory = Memory(1)
    operation = file.write([0], memory.addresses(1), [tag(0)])
    assert stall.begun.wait(60)
    assert not file.close(timeout=0.05)
    stall.over.set()
    assert operation.wait(60)
    for thread in file._threads:
        thread.join(60)
    assert file.close()


def test_a_slot_outside_of_the_slab_is_refused_without_touching_anything(path):
    file = DiskFile(path, 4, SLOT)
    memory = Memory(2)
    for slots in ([0, 4], [-1, 0]):
        operation = file.write(slots, memory.addresses(2), [tag(0), tag(1)])
        assert operation.wait(60)
        assert operation.bad
        assert "outside" in operation.reason
    assert path.stat().st_size == 4 * SLOT
    file.close()


def test_nothing_is_done_at_once(path):
    file = DiskFile(path, 4, SLOT)
    operation = file.read([], [], [])
    assert operation.wait(60)
    assert operation.bad == []
    file.close()


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (1, 0), (1, 4095), (1, 6000)])
def test_slots_that_o_direct_could_not_reach_are_refused(path, slots, slot_bytes):
    with pytest.raises(ValueError, match="multiples of 4096"):
        DiskFile(path, slots, slot_bytes)


@pytest.fixture
def small(tmp_path):
    """A real filesystem of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True)
    if made.returncode:
        pytest.skip("only root may mount a filesystem")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_filesystem_that_is_too_small_is_refused(small):
    with pytest.raises(DiskSpaceError, match=r"asks for 0\.01 GB.*only 0\.00 GB are free"):
        DiskFile(small / "rank-0.slab", 1024, SLOT)
    DiskFile(small / "rank-0.slab", 256, SLOT).close()


def test_a_filesystem_that_fills_up_costs_the_blocks_that_do_not_fit(small, monkeypatch):
    import errno

    monkeypatch.setattr(prealloc, "fallocate", lambda fd, at, size: errno.EOPNOTSUPP)
    file = DiskFile(small / "rank-0.slab", 256, SLOT)
    fill(file, list(range(64)), list(range(64)))
    (small / "other").write_bytes(bytes(3 << 20))
    memory = Memory(192)
    slots = list(range(64, 256))
    operation = file.write(slots, memory.addresses(192), [tag(slot) for slot in slots])
    assert operation.wait(60)
    assert operation.reason == "ENOSPC No space left on device"
    assert 0 < len(operation.bad) < 192
    assert check(file, list(range(64)), list(range(64))) == []
    (small / "other").unlink()
    fill(file, slots, slots)
    assert check(file, slots, slots) == []
    file.close()


@pytest.mark.parametrize("rule", ["disk-read:errno=NOPE", "disk-slow-read:seconds=x", "load:seconds=1", "disk-nothing"])
def test_a_rule_that_is_none_is_refused(rule):
    with pytest.raises(ValueError, match=r"KVBM_INJECT_FAULTS: .* is not kind"):
        disk_io(rule, rank=0)


def test_faults_are_for_the_rank_they_name_and_those_of_copies_are_not_for_the_disk():
    assert type(disk_io("", 0)) is type(disk_io("load,slow-store:every=3", 0)) is FileIO
    io = disk_io("disk-read:rank=1:every=2:errno=ENOSPC", rank=1)
    outcomes = []
    for _ in range(4):
        try:
            io._fail("read", 5)
            outcomes.append(0)
        except OSError as error:
            outcomes.append(error.errno)
    assert outcomes == [0, 28, 0, 28]
    disk_io("disk-read:rank=1", rank=0)._fail("read", 5)
