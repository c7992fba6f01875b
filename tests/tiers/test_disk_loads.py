"""A rank with a disk: blocks go down and come back through host memory, and a disk that fails costs only its blocks."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from kvbm import config as settings
from kvbm.plans import Copy, LoadPlan, MovePlan, MoveResult, StepPlan, StorePlan
from kvbm.runtime.moves import Moves
from kvbm.runtime.rank import Rank
from kvbm.tiers.disk.file import DiskFile, FileIO
from kvbm.tiers.disk.measure import measure
from kvbm.tiers.staged_read import StagedRead, StagedStore, Stretch, expected_if_late, merge_copies
from kvbm.transfer.base import Ticket
from tiernames import DISK, HOST, OBJECT

BLOCKS, SLOTS = 32, 16
CACHE = {"model": "m", "block_size": 4, "pipeline_parallel": 1}


def tags(*slots):
    return [f"block {slot}".encode() for slot in slots]


class Engine:
    """A rank over a cache of its own, driven by hand."""

    def __init__(self, folder, **options):
        self.cache = torch.zeros(BLOCKS, 2, 2, 640, dtype=torch.int32)
        values = {
            "cpu_cache_override_num_blocks": SLOTS,
            "disk_cache_override_num_blocks": 64,
            "disk_cache_dir": str(folder),
            "disk_load_timeout_secs": 60,
            **options,
        }
        config = settings.load(extra=values, environ={}, files=[])
        self.rank = Rank(config, 0, 1, cache=CACHE)
        self.rank.register({f"layer {i}": self.cache[:, i] for i in range(2)}, BLOCKS)
        self.hello = self.rank.open()
        self.last = None

    def step(self, **plans):
        plan, worker = StepPlan(**plans), self.rank.worker
        worker.begin(plan)
        worker.start_loads(plan)
        worker.start_stores(plan)
        self.last = worker.poll()
        return self.last

    def until(self, what, seconds=60.0):
        """Polls until ``what`` finds something in an outcome, that of the last step included."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            outcome, self.last = self.last or self.rank.worker.poll(), None
            if found := what(outcome):
                return found, outcome
            time.sleep(0.002)
        raise TimeoutError

    def loaded(self):
        (results, outcome) = self.until(lambda o: o.report.loads)
        return results[0], outcome

    def fill(self, slots):
        """Known numbers into engine blocks 0, 1, ..., from there to host slots and on to the same slots of the disk."""
        for at in range(0, len(slots), SLOTS):
            part = slots[at : at + SLOTS]
            for i, slot in enumerate(part):
                self.cache[i] = torch.arange(2 * 2 * 640).view(2, 2, 640) + slot * 100_000
            hosts = list(range(len(part)))
            self.step(stores=[StorePlan(at + 1, Copy(HOST, hosts, hosts))])
            self.until(lambda o: o.report.stores)
            self.step(moves=[MovePlan(at + 2, HOST, DISK, hosts, part, tags(*part))])
            ((result,), _) = self.until(lambda o: o.report.moves)
            assert result.bad == []
            assert result.seconds > 0
        self.cache.zero_()

    def holds(self, block, slot):
        return torch.equal(self.cache[block], torch.arange(2 * 2 * 640).view(2, 2, 640) + slot * 100_000)


@pytest.fixture
def make(tmp_path):
    made = []

    def engine(**options):
        made.append(Engine(tmp_path / "cache", **options))
        return made[-1]

    yield engine
    for each in made:
        each.rank.close()


def load(slots, blocks, via, id=77, deadline_seconds=0.0, first=(), stall_seconds=0.0):
    return LoadPlan(
        id,
        "r",
        [*first, Copy(DISK, slots, blocks, via, tags(*slots))],
        in_step=False,
        deadline_seconds=deadline_seconds,
        stall_seconds=stall_seconds,
    )


def test_a_rank_says_how_much_disk_it_has(make):
    assert make().hello.slots == {HOST: SLOTS, DISK: 64}


@pytest.mark.parametrize("host", [SLOTS, 0], ids=["host and disk", "disk"])
@pytest.mark.parametrize("call", ["prealloc.fallocate", "prealloc._refuse_without_room", "file.open_sums"])
def test_a_filesystem_that_is_full_at_start_costs_the_disk_and_nothing_later(make, monkeypatch, caplog, call, host):
    make(cpu_cache_override_num_blocks=host).rank.close()

    def full(*arguments):
        if call == "prealloc.fallocate":
            return errno.ENOSPC
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(f"kvbm.tiers.disk.{call}", full)
        # Larger than before, so that it needs room.
        engine = make(cpu_cache_override_num_blocks=host, disk_cache_override_num_blocks=96)
    assert DISK not in engine.rank.hello().slots
    assert "No space left on device. Blocks on disk are kept for the next start" in caplog.text
    engine.rank.close()
    assert make(cpu_cache_override_num_blocks=host).rank.hello().slots[DISK] == 64


def test_a_rank_says_how_fast_its_disk_is(make, monkeypatch):
    monkeypatch.setattr("kvbm.tiers.disk.measure._MEASURE_SECONDS", 60.0)
    for _ in range(2):  # new, and with blocks from the engine before
        engine = make()
        rate, fixed = engine.hello.tier(DISK).rate
        assert 0 < rate < 1e12
        assert fixed >= 0
        engine.fill([3, 4])
        engine.rank.close()


def test_what_went_to_disk_comes_back_through_host_memory(make):
    engine = make()
    engine.fill([3, 4, 9])
    engine.step(stores=[StorePlan(50, Copy(HOST, list(range(SLOTS)), list(range(SLOTS))))])  # zeros over all of it
    engine.until(lambda o: o.report.stores)
    engine.step(loads=[load([3, 4, 9], [20, 21, 30], [7, 5, 6])])
    result, outcome = engine.loaded()
    assert (result.bad, result.missed, result.late) == ([], [], [])
    assert result.tier_seconds.keys() == {DISK}
    assert outcome.arrived == {"r"}
    assert all(engine.holds(block, slot) for block, slot in ((20, 3), (21, 4), (30, 9)))
    # And it has stayed in the host slots it passed through.
    engine.step(loads=[LoadPlan(78, "r", [Copy(HOST, [7, 5, 6], [1, 2, 3])], in_step=True)])
    assert all(engine.holds(block, slot) for block, slot in ((1, 3), (2, 4), (3, 9)))


@pytest.mark.parametrize("hosts", [1, 2, 3, 7, 13])
def test_a_load_may_pass_through_fewer_slots_than_it_has_blocks(hosts, make):
    engine = make()
    slots = [*range(40, 64), 1, 5]
    engine.fill(slots)
    blocks = list(range(len(slots)))
    engine.step(loads=[load(slots, blocks, list(range(hosts)))])
    result, _ = engine.loaded()
    assert (result.bad, result.missed) == ([], [])
    assert all(engine.holds(block, slot) for block, slot in zip(blocks, slots, strict=True))


def test_a_load_of_two_tiers_is_over_when_both_are(make):
    engine = make()
    engine.fill([3, 4])
    engine.cache[9] = 42
    engine.step(stores=[StorePlan(50, Copy(HOST, [15], [9]))])
    engine.until(lambda o: o.report.stores)
    engine.step(loads=[load([4, 3], [21, 22], [0, 1], first=[Copy(HOST, [15], [20])])])
    result, _ = engine.loaded()
    assert not result.bad
    assert torch.all(engine.cache[20] == 42)
    assert engine.holds(21, 4)
    assert engine.holds(22, 3)
    assert result.tier_seconds.keys() == {HOST, DISK}


def test_the_next_engine_finds_what_this_one_has_written(make):
    first = make()
    first.fill([3, 4])
    first.rank.close()
    second = make()
    second.step(loads=[load([3, 4], [20, 21], [7, 5])])
    assert second.loaded()[0].bad == []
    assert second.holds(20, 3)
    assert second.holds(21, 4)


def test_another_block_than_the_one_asked_for_is_bad(make):
    engine = make()
    engine.fill([3, 4])
    plan = LoadPlan(77, "r", [Copy(DISK, [3, 4], [20, 21], [7, 5], tags(3, 8))], in_step=False)
    engine.step(loads=[plan])
    result, outcome = engine.loaded()
    assert (result.bad, result.missed) == ([1], [])
    assert outcome.bad_blocks == {21}
    assert outcome.report.faults == {"disk load: checksum mismatch": 1}
    assert engine.holds(20, 3)
    assert torch.all(engine.cache[21] == 0)  # nothing of it has come near the engine


def test_blocks_that_cannot_be_read_are_bad_and_the_others_arrive(make):
    engine = make()
    engine.fill([2, 4, 6, 8])
    engine.rank.close()
    engine = make(inject_faults="disk-read:every=3")
    engine.step(loads=[load([2, 4, 6, 8], [20, 21, 22, 23], [0, 1, 2, 3])])
    result, outcome = engine.loaded()
    assert len(result.bad) == 1
    assert outcome.bad_blocks == {20 + result.bad[0]}
    assert outcome.report.faults == {"disk load: EIO Input/output error": 1}
    for i in set(range(4)) - set(result.bad):
        assert engine.holds(20 + i, 2 + 2 * i)


def test_blocks_that_cannot_be_written_are_named(make):
    engine = make(inject_faults="disk-write:every=2")
    engine.step(moves=[MovePlan(5, HOST, DISK, [0, 1, 2], [10, 20, 30], tags(1, 2, 3))])
    ((result,), outcome) = engine.until(lambda o: o.report.moves)
    assert len(result.bad) in (1, 2)
    assert outcome.report.faults == {"spill: ENOSPC No space left on device": 1}


def test_without_room_in_host_memory_blocks_on_disk_are_missed(make):
    engine = make()
    engine.fill([3])
    outcome = engine.step(loads=[load([3], [20], [])])
    assert (outcome.report.loads[0].bad, outcome.report.loads[0].missed) == ([], [0])
    assert outcome.bad_blocks == {20}
    assert outcome.arrived == {"r"}


@pytest.mark.parametrize(("within", "silent"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)])
def test_a_disk_that_hangs_is_given_up_and_its_late_reads_are_told_of(within, silent, make, stall):
    engine = make()
    engine.fill([3, 4])
    engine.rank.close()
    patience = 100 if within or silent else 0.1
    engine = make(inject_faults="disk-slow-read", disk_load_timeout_secs=patience)
    began = time.monotonic()
    engine.step(loads=[load([3, 4], [20, 21], [7, 5], deadline_seconds=within, stall_seconds=silent)])
    result, outcome = engine.loaded()
    assert time.monotonic() - began >= 0.1
    assert (result.bad, result.missed, result.late) == ([], [0, 1], [DISK])
    assert outcome.arrived == {"r"}
    assert outcome.bad_blocks == {20, 21}
    (fault,) = outcome.report.faults
    assert fault.startswith("disk load: gave up waiting for the disk tier: ")
    assert result.tier_seconds[DISK] >= 0.1
    assert not engine.rank.worker.poll().report.loads
    stall.over.set()
    last, outcome = engine.loaded()
    assert (last.id, last.bad, last.missed, last.late) == (77, [], [], [])
    assert not outcome.arrived
    assert not outcome.bad_blocks
    assert torch.all(engine.cache == 0)  # what came late has not touched the engine's blocks
    engine.step(loads=[LoadPlan(78, "r", [Copy(HOST, [7, 5], [1, 2])], in_step=True)])
    assert engine.holds(1, 3)
    assert engine.holds(2, 4)


def test_a_step_never_waits_for_a_disk_that_hangs(make, stall):
    engine = make(inject_faults="disk-slow-read,disk-slow-write", disk_load_timeout_secs=0.2)
    for number in range(30):  # the disk answers to none of them, so a step that waited for it would not end
        plans = {"moves": [MovePlan(1, HOST, DISK, [0], [1], tags(1))]} if number == 0 else {}
        if number == 1:
            plans = {"loads": [load([3], [20], [4])]}
        plans["stores"] = [StorePlan(1000 + number, Copy(HOST, [8], [9]))]
        engine.step(**plans)
        time.sleep(0.02)
    assert stall.begun.wait(60)


def test_memory_that_a_disk_may_still_write_to_is_not_given_back(make, monkeypatch, stall, caplog):
    engine = make()
    engine.fill([3])
    engine.rank.close()
    monkeypatch.setattr("kvbm.tiers.bounded.DISK_END_SECONDS", 0.1)
    engine = make(inject_faults="disk-slow-read")
    engine.step(loads=[load([3], [20], [7])])
    assert stall.begun.wait(60)
    address = engine.rank._slab.address + 7 * 12288
    engine.rank.close()
    assert "has not answered for 0 s" in caplog.text
    gc.collect()
    stall.over.set()
    deadline = time.monotonic() + 60
    while ctypes.string_at(address, 4) != (3 * 100_000).to_bytes(4, "little"):  # it ends, well after the engine
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    "copy",
    [
        Copy(DISK, [64], [20], [1], tags(1)),
        Copy(DISK, [-1], [20], [1], tags(1)),
        Copy(DISK, [1], [20], [SLOTS], tags(1)),
        Copy(DISK, [1], [20], [1]),
        Copy(DISK, [1], [BLOCKS], [1], tags(1)),
        Copy(OBJECT, [1], [20], [1], tags(1)),
    ],
    ids=["slot", "negative", "host slot", "no tags", "block", "tier"],
)
def test_a_plan_outside_of_the_tiers_moves_nothing(copy, make):
    engine = make()
    outcome = engine.step(loads=[LoadPlan(77, "r", [copy], in_step=False)])
    assert outcome.report.loads[0].missed == [0]
    assert outcome.arrived == {"r"}
    assert outcome.bad_blocks == set(copy.blocks)


def test_a_step_without_a_forward_pass_writes_to_disk_too(make):
    """vLLM starts no stores in such a step, and asks for results all the same."""
    engine = make()
    plan = StepPlan(moves=[MovePlan(5, HOST, DISK, [0, 1], [10, 20], tags(1, 2))])
    engine.rank.worker.begin(plan)
    engine.rank.worker.start_loads(plan)
    ((result,), _) = engine.until(lambda o: o.report.moves)
    assert (result.id, result.bad) == (5, [])
    time.sleep(0.05)
    assert not engine.rank.worker.poll().report.moves


@pytest.mark.parametrize(("slots", "targets"), [([SLOTS], [1]), ([1], [64]), ([-1], [1]), ([], [])])
def test_a_spill_outside_of_the_tiers_writes_nothing(slots, targets, make):
    engine = make()
    outcome = engine.step(moves=[MovePlan(5, HOST, DISK, slots, targets, tags(*targets))])
    assert outcome.report.moves[0].bad == list(range(len(slots)))
    assert len(outcome.report.faults) == 1


def test_blocks_from_disk_cannot_be_had_in_the_step(make):
    engine = make()
    engine.fill([3])
    plan = LoadPlan(77, "r", [Copy(DISK, [3], [20], [7], tags(3))], in_step=True)
    outcome = engine.step(loads=[plan])
    assert outcome.report.loads[0].missed == [0]
    assert outcome.bad_blocks == {20}


def test_a_cache_that_another_engine_uses_is_left_to_it(make, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("kvbm.tiers.disk.open.PATIENCE_SECONDS", 0.1)
    make()
    second = make()
    assert second.hello.slots == {HOST: SLOTS}
    assert "goes on without a disk tier" in caplog.text
    assert "in use by another engine" in caplog.text


def test_more_than_the_disk_has_is_refused_at_start(tmp_path):
    with pytest.raises(OSError, match=r"DYN_KVBM_DISK_CACHE_GB"):
        Engine(tmp_path, disk_cache_override_num_blocks=2**31 - 1)


def test_a_disk_that_holds_no_block_is_refused_at_start(tmp_path):
    with pytest.raises(ValueError, match=r"DYN_KVBM_DISK_CACHE_GB=1e-06 holds no block"):
        Engine(tmp_path, disk_cache_override_num_blocks=0, disk_cache_gb=1e-6)


def test_without_a_host_tier_blocks_pass_through_a_little_memory(make):
    engine = make(cpu_cache_override_num_blocks=0, disk_bounce_mb=1)
    assert engine.hello.slots == {HOST: (1 << 20) // 12288, DISK: 64}


# -- a stretch on its way up, with a disk and a copier that do as they are told ---------------------------------------


class FakeOperation:
    began, ended = 1.0, 2.0

    def __init__(self, slots, hosts):
        self.slots, self.hosts = list(slots), list(hosts)
        self.bad, self.reason, self.over = [], "", False

    def done(self):
        return self.over

    def cancel(self):
        self.cancelled = True


class FakeTicket(Ticket):
    over, failed = False, False

    def done(self):
        return self.over

    def wait(self):
        raise AssertionError("nobody may wait")

    @property
    def bad(self):
        return [0] if self.failed else []


@pytest.fixture
def disk():
    made = []
    file = SimpleNamespace(slots=100, slot_bytes=16 << 20, chunk_bytes=32 << 20, stall_seconds=1.0, close=lambda: True)

    def read(slots, addresses, tags):
        made.append(FakeOperation(slots, [address // file.slot_bytes for address in addresses]))
        return made[-1]

    file.read = read
    disk = StagedStore(DISK, file, 0, file.slot_bytes, clock=lambda: 0.0)
    disk.made = made
    return disk


def stretch(count, hosts, first=0):
    numbers = list(range(first, first + count))
    return Stretch(numbers, [10 + i for i in numbers], [100 + i for i in numbers], hosts, tags(*numbers))


def test_the_whole_match_is_read_ahead(disk):
    ascent = StagedRead(disk, stretch(5, [4, 3, 2, 1, 0]))
    ascent.advance(None)
    assert [operation.slots for operation in disk.made] == [[10, 11], [12, 13], [14]]
    assert [operation.hosts for operation in disk.made] == [[4, 3], [2, 1], [0]]


def test_chunks_that_have_come_go_to_the_copier_in_one_call(disk):
    """Each call takes the engine's thread some time."""
    tickets, sent = [], []

    def send(hosts, blocks):
        sent.append((hosts, blocks))
        tickets.append(FakeTicket())
        return tickets[-1]

    read = StagedRead(disk, stretch(6, [5, 4, 3, 2, 1, 0]))
    read.advance(send)
    disk.made[0].over = disk.made[1].over = True
    disk.made[1].bad = [0]
    read.advance(send)
    assert sent == [([5, 4, 2], [100, 101, 103])]
    disk.made[2].over = True
    read.advance(send)
    assert sent[1:] == [([1, 0], [104, 105])]
    for ticket in tickets:
        ticket.over = True
    tickets[0].failed = True
    read.advance(send)
    assert read.done()
    assert (read.bad, read.missed) == ({2}, {0, 1, 2, 3})


def test_a_host_slot_is_read_into_again_only_when_the_copy_from_it_is_over(disk):
    tickets, sent = [], []

    def send(slots, blocks):
        tickets.append(FakeTicket())
        sent.append((slots, blocks))
        return tickets[-1]

    ascent = StagedRead(disk, stretch(4, [8, 9]))
    ascent.advance(send)
    assert [operation.hosts for operation in disk.made] == [[8], [9]]
    disk.made[0].over = True
    ascent.advance(send)
    assert sent == [([8], [100])]
    assert len(disk.made) == 2
    tickets[0].over = True
    ascent.advance(send)
    ascent.advance(send)
    assert [operation.hosts for operation in disk.made] == [[8], [9], [8]]
    assert disk.made[2].slots == [12]


def reading(disk, count, read, seconds):
    """A stretch of which the first so many blocks have come, so many seconds after the disk began on it."""
    disk.clock = lambda: 100.0
    ascent = StagedRead(disk, stretch(count, list(range(count))))
    ascent.advance(None)  # begins everything
    ascent.advance(None)  # and sees that it has
    for operation in disk.made[: read // 2]:
        operation.over = True
    ascent.advance(lambda slots, blocks: FakeTicket())
    return expected_if_late([ascent], 10.0, 100.0 + seconds)


@pytest.mark.parametrize(
    ("read", "seconds", "expected"),
    [
        (0, 0.2, None),  # a chunk of two blocks may take 0.2 s
        (0, 0.34, None),  # and the disk some time to begin
        (0, 0.36, 10.0),
        (50, 5.3, None),
        (50, 5.4, 10.8),
        (50, 50.0, 100.0),
        (98, 10.1, None),
        (100, 99.0, None),  # nothing is left to give up
    ],
)
def test_a_load_that_falls_behind_computing_is_seen_early(read, seconds, expected, disk):
    """A hundred blocks that would be computed in 10 s."""
    assert reading(disk, 100, read, seconds) == (None if expected is None else pytest.approx(expected))


def test_a_load_that_waits_for_its_turn_is_not_behind(disk, monkeypatch):
    monkeypatch.setattr(FakeOperation, "began", 0.0)
    ascent = StagedRead(disk, stretch(100, list(range(100))))
    ascent.advance(None)
    assert expected_if_late([ascent], 1.0, 1000.0) is None


def test_a_load_sees_that_its_tier_goes_on_reading_for_a_fetch(disk):
    """A fetch may take longer than a load waits for a tier that delivers nothing."""
    now = [1.0]
    disk.clock = lambda: now[0]
    moves = Moves(HOST, {DISK: disk}, lambda tier, slots: None, Counter())
    moves.start([MovePlan(1, DISK, HOST, [10, 11, 12, 13, 14], [4, 3, 2, 1, 0], tags(*range(5)))])
    assert [operation.slots for operation in disk.made] == [[10, 11], [12, 13], [14]]
    assert [operation.hosts for operation in disk.made] == [[4, 3], [2, 1], [0]]
    for number, operation in enumerate(disk.made):
        assert moves.take_ended() == []
        now[0] += 10.0
        operation.over, operation.began, operation.ended = True, now[0], now[0] + 5.0
        operation.bad = [1] if number == 1 else []
        results = moves.take_ended()
        assert disk.heard_at == now[0]
    assert results == [MoveResult(1, [3], 25.0)]


def test_a_fetch_of_which_a_part_cannot_begin_ends_after_the_parts_that_have(disk):
    """Their near slots are written to until then."""
    read, faults = disk._store.read, Counter()

    def only_once(*arguments):
        if disk.made:
            raise RuntimeError("no thread")
        return read(*arguments)

    disk._store.read = only_once
    moves = Moves(HOST, {DISK: disk}, lambda tier, slots: None, faults)
    moves.start([MovePlan(1, DISK, HOST, [10, 11, 12], [2, 1, 0], tags(*range(3)))])
    assert moves.take_ended() == []
    disk.made[0].over = True
    assert moves.take_ended() == [MoveResult(1, [2], 1.0)]
    assert list(faults) == ["spill: RuntimeError: no thread"]


def test_what_was_given_up_is_not_read_any_more_and_not_taken_for_bad(disk):
    ascent = StagedRead(disk, stretch(6, list(range(6))))
    ascent.advance(None)
    ascent.give_up("late")
    assert all(operation.cancelled for operation in disk.made)
    for operation, bad in zip(disk.made, ([], [1], [0, 1]), strict=True):
        operation.over, operation.bad = True, bad
    ascent.collect()
    assert not ascent.owes
    assert ascent.bad == set()
    assert ascent.missed == {3, 4, 5}


def test_a_read_that_ends_just_after_it_was_given_up_has_not_arrived(disk):
    """The engine's blocks were not written: whoever counts on them must hear so, though the host slot is good."""
    ascent = StagedRead(disk, stretch(2, [0, 1], first=5))
    ascent.advance(None)
    ascent.give_up("late")
    disk.made[0].over = True
    assert ascent.done()
    assert ascent.owes
    assert ascent.missed == {5, 6}
    ascent.collect()
    assert not ascent.owes
    assert ascent.missed == set()


def test_what_was_read_before_it_was_given_up_is_still_copied(disk):
    ticket = FakeTicket()
    ascent = StagedRead(disk, stretch(4, [0, 1, 2, 3]))
    ascent.advance(None)
    disk.made[0].over = True
    ascent.advance(lambda slots, blocks: ticket)
    ascent.give_up("late")
    assert ascent.missed == {2, 3}
    assert not ascent.done()
    ticket.over = True
    ascent.advance(None)
    assert ascent.done()
    assert ascent.owes


def test_a_copy_that_fails_is_no_fault_of_the_disk(disk):
    ticket = FakeTicket()
    ascent = StagedRead(disk, stretch(2, [0, 1]))
    ascent.advance(None)
    disk.made[0].over = ticket.over = ticket.failed = True
    ascent.advance(lambda slots, blocks: ticket)
    assert ascent.done()
    assert (ascent.bad, ascent.missed) == (set(), {0, 1})


def test_blocks_that_the_copier_refuses_are_missed_and_the_load_ends(disk):
    """Counted as arrived, they would be computed on: the engine's blocks hold another request's KV."""

    def refuse(slots, blocks):
        raise MemoryError("no staging buffer")

    read = StagedRead(disk, stretch(6, list(range(6))))
    read.advance(refuse)
    disk.made[0].over = disk.made[1].over = True
    disk.made[1].bad = [1]
    read.advance(refuse)
    assert (read.bad, read.missed) == ({3}, {0, 1, 2})
    assert read.reasons == {"MemoryError: no staging buffer"}
    ticket = FakeTicket()
    disk.made[2].over = ticket.over = True
    read.advance(lambda slots, blocks: ticket)
    assert read.done()
    assert (read.bad, read.missed) == ({3}, {0, 1, 2})


def test_a_match_that_changes_tiers_at_every_block_is_read_in_few_pieces():
    copies = [(2 * i, Copy(DISK, [i], [50 + i], [20 + i], tags(i))) for i in range(5)]
    turns = (10, Copy(DISK, [7, 8, 9], [1, 2, 3], [30], tags(7, 8, 9)))
    whole, ring = merge_copies([*copies[:3], turns, *copies[3:]])
    assert whole == Stretch(
        [0, 2, 4, 6, 8], [0, 1, 2, 3, 4], [50, 51, 52, 53, 54], [20, 21, 22, 23, 24], tags(*range(5))
    )
    assert ring == Stretch([10, 11, 12], [7, 8, 9], [1, 2, 3], [30], tags(7, 8, 9))


def test_a_step_with_a_draft_model_writes_to_disk_once(make):
    """vLLM asks for results first then, and has the stores started afterwards."""
    engine = make()
    worker, disk = engine.rank.worker, engine.rank.worker._tiers[DISK]
    writes, write = [], disk.write
    disk.write = lambda *arguments: (writes.append(arguments), write(*arguments))[1]
    plan = StepPlan(moves=[MovePlan(5, HOST, DISK, [0, 1], [10, 20], tags(1, 2))])
    worker.begin(plan)
    worker.start_loads(plan)
    engine.last = worker.poll()
    worker.start_stores(plan)
    ((result,), _) = engine.until(lambda o: o.report.moves)
    assert (result.id, result.bad, len(writes)) == (5, [], 1)


def test_a_step_that_nobody_ends_has_its_spills_written_with_the_next(make):
    engine = make()
    engine.rank.worker.begin(StepPlan(moves=[MovePlan(5, HOST, DISK, [0], [10], tags(1))]))
    engine.step(moves=[MovePlan(6, HOST, DISK, [1], [20], tags(2))])
    found = []
    while len(found) < 2:
        results, _ = engine.until(lambda o: o.report.moves)
        found += results
    assert sorted((result.id, result.bad) for result in found) == [(5, []), (6, [])]


class _Stuck(FileIO):
    """A disk that takes no write to its end before the gate is open."""

    def __init__(self):
        self.gate = threading.Event()
        self.written = []  # where

    def write(self, fd, buffers, offset):
        self.written.append(offset)
        self.gate.wait(60)
        return super().write(fd, buffers, offset)


def test_what_was_to_be_tried_on_a_disk_that_hangs_is_not_written_later(tmp_path, monkeypatch):
    """It would come on top of the blocks that lie there by then."""
    monkeypatch.setattr("kvbm.tiers.disk.measure._MEASURE_SECONDS", 0.05)
    size, io = 256 << 10, _Stuck()
    file = DiskFile(tmp_path / "rank-0.slab", 128, size, threads=1, io=io)
    assert measure(file) is None
    io.gate.set()
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert file.write([100], [address], [b"tag"]).wait(60)
    assert io.written in ([0, 100 * size], [100 * size])  # of the trial only what had begun
    file.close()
