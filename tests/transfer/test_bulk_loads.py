"""Long loads, carried out by hand: every command to the copy engine and every kernel at the moment it is submitted.

What this cannot show is the order between streams. What it does show, without a GPU, is that every byte gets to its
place, whatever is fetched ahead and however many buffers there are.
"""

from __future__ import annotations

import ctypes
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvbm.tiers.host.slab import HostSlab  # noqa: E402
from kvbm.transfer import bulk_loads, cuda  # noqa: E402
from kvbm.transfer.base import When  # noqa: E402
from layouts import LAYOUTS, by_block, layout_of  # noqa: E402

BLOCKS = 24
SLOTS = 40


class FakeEvent:
    def record(self, stream=None):
        pass


class FakeStream:
    priority = 0

    def wait_event(self, event):
        assert isinstance(event, FakeEvent)


class FakeKernel:
    """What the copy kernel does, piece by piece."""

    def __init__(self, layout, slab):
        self.layout, self.slab = layout, slab
        self.arrived = [0] * len(layout.layers)
        self.read_slots = 0
        self.uploaded = 0  # and not released

    def upload(self, blocks):
        self.uploaded += 1
        return list(blocks)

    def release(self, indices):
        self.uploaded -= 1

    def from_rows(self, indices, start, end, address, row, first, last, signal, gently=False):
        for i, block in enumerate(indices[start:end]):
            self._piece(self.layout.segments[first:last], block, address + i * row, signal)

    def to_device(self, slots, blocks, first=0, signal=False):
        self.read_slots += len(slots)
        for slot, block in zip(slots, blocks, strict=True):
            self._piece(self.layout.segments[first:], block, self.slab.address + slot * self.slab.slot_bytes, signal)

    def _piece(self, segments, block, address, signal):
        for segment in segments:
            ctypes.memmove(int(segment.address + block * segment.stride), int(address + segment.offset), segment.size)
            self.arrived[segment.layer] += signal


class Bench:
    def __init__(self, make, rows, buffers, patch):
        self.tensors = make("cpu", BLOCKS)
        self.layout = layout_of(self.tensors, BLOCKS)
        self.slab = HostSlab(SLOTS * self.layout.slot_bytes).carve(SLOTS, self.layout.slot_bytes)
        self.contents = random.Random(1).randbytes(SLOTS * self.layout.slot_bytes)
        ctypes.memmove(self.slab.address, self.contents, len(self.contents))
        self.kernel = FakeKernel(self.layout, self.slab)
        self.commands = []  # bytes of each
        buffer = rows * self.layout.block_bytes + 4096
        memory = torch.zeros(buffers * buffer, dtype=torch.uint8)
        stream = FakeStream()
        patch.setattr(bulk_loads, "_BUFFER_BYTES", buffer)
        patch.setattr("kvbm.tiers.host.slab._PIN_PIECE", 7 * self.layout.slot_bytes)
        patch.setattr(bulk_loads, "copy_rows", self.copy_rows)
        self.loads = bulk_loads.BulkLoads(
            self.layout, self.slab, torch.device("cpu"), stream, self.kernel, memory, self.batch
        )
        assert len(self.loads._buffers) == buffers

    def batch(self, targets, sources, size, stream):
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, size)
            self.commands.append(size)

    def copy_rows(self, target, target_pitch, source, source_pitch, size, rows, stream):
        first, last = ((source - self.slab.address + i * source_pitch) // self.slab.slot_bytes for i in (0, rows - 1))
        pieces = {slot // self.slab.piece_slots for slot in (first, last)}
        assert len(pieces) == 1, "one copy over the end of what is pinned together"
        for i in range(rows):
            ctypes.memmove(target + i * target_pitch, source + i * source_pitch, size)
        self.commands.append(size * rows)

    def check(self, slots, blocks):
        for slot, block in zip(slots, blocks, strict=True):
            at = slot * self.layout.slot_bytes
            for segment in self.layout.segments:
                found = ctypes.string_at(segment.address + block * segment.stride, segment.size)
                assert found == self.contents[at + segment.offset :][: segment.size]

    def wipe(self):
        for tensor in self.tensors:
            by_block(tensor, BLOCKS).view(torch.uint8).zero_()


FAKES = SimpleNamespace(
    Stream=lambda device, priority: FakeStream(), Event=FakeEvent, stream=lambda stream: nullcontext()
)


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.__name__)
def bench(request, monkeypatch):
    monkeypatch.setattr(bulk_loads.torch, "cuda", FAKES)
    made = []

    def make(rows=3, buffers=2):
        made.append(Bench(request.param, rows, buffers, monkeypatch))
        return made[-1]

    yield make
    for bench in made:
        bench.slab.close()


RUN, SCATTERED = list(range(9, 21)), [25, 21, 39, 0, 27, 3, 8]


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
@pytest.mark.parametrize("slots", [RUN, RUN[::-1], SCATTERED, [5]], ids=["run", "backwards", "scattered", "one"])
@pytest.mark.parametrize(("rows", "buffers"), [(1, 2), (3, 2), (2, 5), (100, 2)])
def test_every_byte_gets_to_its_block(bench, slots, whole, rows, buffers):
    bench = bench(rows, buffers)
    blocks = random.Random(2).sample(range(BLOCKS), len(slots))
    bench.loads.place(bench.loads.begin(slots, whole), blocks, signal=True)
    bench.check(slots, blocks)
    # Attention waits for so many pieces of each layer.
    expected = [0] * len(bench.layout.layers)
    for segment in bench.layout.segments:
        expected[segment.layer] += len(slots)
    assert bench.kernel.arrived == expected


def test_loads_take_turns_and_what_is_not_placed_leaves_nothing_behind(bench):
    bench = bench(rows=2, buffers=3)
    source = random.Random(3)
    for turn in range(20):
        bench.wipe()
        slots = sorted(source.sample(range(SLOTS), source.randrange(1, 12)), key=lambda _: source.random())
        blocks = source.sample(range(BLOCKS), len(slots))
        fetch = bench.loads.begin(slots, whole=turn % 2 == 0)
        if turn % 5 == 4:
            continue
        bench.loads.place(fetch, blocks, signal=False)
        bench.check(slots, blocks)


@pytest.mark.parametrize("slots", [RUN, SCATTERED], ids=["run", "scattered"])
@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_others_have_their_turn_after_every_few_slots(bench, slots, at_a_time, monkeypatch):
    bench = bench(rows=5)
    slot = bench.layout.block_bytes
    monkeypatch.setattr(bulk_loads, "_GENTLE_BYTES", at_a_time * slot)
    monkeypatch.setattr(bench.loads._relay, "hand_over", lambda: bench.commands.append("turn"))
    blocks = list(range(len(slots)))
    bench.loads.place(bench.loads.begin(slots, whole=True, gently=True), blocks, signal=False)
    bench.check(slots, blocks)
    turns = " ".join(map(str, bench.commands)).split("turn")
    copied = [sum(map(int, turn.split())) for turn in turns]
    assert copied.pop() == 0
    assert max(copied) <= max(at_a_time, 1) * slot
    assert sum(copied) == len(slots) * slot


@pytest.fixture
def copier(monkeypatch):
    """Makes one over a bench."""
    monkeypatch.setattr(cuda, "mark", lambda stream: FakeEvent())

    def make(bench):
        copier = object.__new__(cuda.CudaCopier)
        copier._bulk, copier._bulk_blocks, copier._prefetched = bench.loads, 1, None
        copier.load_stream = copier.engine_stream = FakeStream()
        copier._step_began = FakeEvent()
        return copier

    return make


def test_others_have_their_turn_from_the_start_of_a_load_that_no_step_waits_for(bench, copier, monkeypatch):
    bench = bench(rows=100)
    copier = copier(bench)
    monkeypatch.setattr(bulk_loads, "_GENTLE_BYTES", 3 * bench.layout.block_bytes)
    monkeypatch.setattr(bulk_loads, "_STEP_TURNS", 1)
    monkeypatch.setattr(bench.loads._relay, "hand_over", lambda: bench.commands.append("turn"))
    copier.load(RUN, list(range(len(RUN))), [], When.LATER)
    bench.check(RUN, list(range(len(RUN))))
    assert bench.commands.count("turn") == len(RUN) // 3


@pytest.mark.parametrize("when", [When.LATER, When.NOW])
def test_what_was_fetched_for_a_step_makes_way_for_others_once_no_step_waits_for_it(bench, copier, when, monkeypatch):
    bench = bench(rows=2)
    copier = copier(bench)
    turns = []
    monkeypatch.setattr(bench.loads._relay, "hand_over", lambda: turns.append(len(bench.commands)))
    blocks = list(range(len(RUN)))
    assert copier.prefetch(RUN, 1)
    fetched = len(bench.commands)
    copier.load(RUN, blocks, [], when)
    bench.check(RUN, blocks)
    if when is When.LATER and len(bench.commands) > fetched:  # else small enough to have been fetched as a whole
        assert turns[-1] == len(bench.commands)
    elif when is When.NOW and len(bench.commands) > fetched:
        assert turns[-1] < len(bench.commands)


@pytest.mark.parametrize("slots", [RUN, SCATTERED], ids=["run", "scattered"])
@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole"])
def test_the_step_that_waits_for_a_load_gets_its_inputs_during_the_first_half_of_it(bench, slots, whole, monkeypatch):
    bench = bench(rows=4)
    monkeypatch.setattr(bench.loads._relay, "hand_over", lambda: bench.commands.append("turn"))
    fetch = bench.loads.begin(slots, whole)
    bench.loads.place(fetch, list(range(len(slots))), signal=False)
    last = len(bench.commands) - bench.commands[::-1].index("turn")
    before, after = (sum(c for c in part if c != "turn") for part in (bench.commands[:last], bench.commands[last:]))
    total = sum((portion.end - portion.start) * portion.row for portion in fetch.portions)
    assert before + after == total
    assert bench.commands.count("turn") >= len(fetch.portions) / 2
    if len(fetch.portions) > 2:
        assert after >= total / 8
    assert bench.commands.count("turn") <= 2 * bulk_loads._STEP_TURNS + len(fetch.portions)


@pytest.mark.parametrize("rows", [1, 6, 100])
@pytest.mark.parametrize("slots", [RUN, SCATTERED], ids=["run", "scattered"])
def test_a_step_has_all_its_turns_in_the_first_half_of_its_load(bench, slots, rows, monkeypatch):
    bench = bench(rows)
    monkeypatch.setattr(bulk_loads, "_STEP_TURNS", 3)
    monkeypatch.setattr(bench.loads._relay, "hand_over", lambda: bench.commands.append("turn"))
    bench.loads.place(bench.loads.begin(slots, whole=True), list(range(len(slots))), signal=False)
    assert 3 <= bench.commands.count("turn") <= 2 * 3 + 1


def test_neighbours_are_one_copy_once_nobody_needs_a_turn(bench, monkeypatch):
    monkeypatch.setattr(bulk_loads.Fetch, "at_a_time", 0)
    bench = bench(rows=100)
    bench.loads.begin(RUN, whole=True)
    assert len(bench.commands) == len({slot // bench.slab.piece_slots for slot in RUN})


@pytest.mark.parametrize("gently", [False, True])
def test_slots_in_many_runs_make_no_more_turns(bench, gently, monkeypatch):
    """A turn costs next to nothing, but not after every few kilobytes."""
    bench = bench(rows=100)
    monkeypatch.setattr(bulk_loads, "_MIN_RUN", 1)
    monkeypatch.setattr(bulk_loads, "_STEP_TURNS", 1)
    monkeypatch.setattr(bulk_loads, "_GENTLE_BYTES", 100 * bench.layout.block_bytes)
    monkeypatch.setattr(bench.loads._relay, "hand_over", lambda: bench.commands.append("turn"))
    apart = list(range(0, 40, 2))
    fetch = bench.loads.begin(apart, whole=True, gently=gently)
    bench.loads.place(fetch, list(range(len(apart))), signal=False)
    bench.check(apart, list(range(len(apart))))
    assert bench.commands.count("turn") <= 2
    assert len(bench.commands) >= len(apart)


def test_slots_in_many_runs_come_in_fewer_groups(bench, monkeypatch):
    """A group more is a copy more for every run."""
    bench = bench(rows=100)
    groups = []
    for copies in (1000, 2 * len(bench.layout.layers), 4, 0):
        monkeypatch.setattr(bulk_loads, "_MAX_COPIES", copies)
        fetch = bench.loads.begin(RUN)
        groups.append(len({portion.first for portion in fetch.portions}))
        bench.loads.place(fetch, list(range(len(RUN))), signal=False)
        bench.check(RUN, list(range(len(RUN))))
        bench.wipe()
    assert groups == sorted(groups, reverse=True)
    assert groups[-1] == 1


def test_twice_as_many_runs_come_in_half_as_many_groups(bench, monkeypatch):
    monkeypatch.setattr(bulk_loads, "_MIN_RUN", 1)
    monkeypatch.setattr(bulk_loads, "_MAX_COPIES", 4)
    bench = bench(rows=100)
    two, four = [0, 1, 3, 4], [0, 2, 4, 6]
    for slots, groups in ((two, 2), (four, 1)):
        fetch = bench.loads.begin(slots)
        assert len({portion.first for portion in fetch.portions}) == groups
    # In a single group the last layers would keep the engine waiting: the kernel alone brings them.
    bench.loads.place(bench.loads.begin(four), [0, 1, 2, 3], signal=False)
    assert bench.kernel.read_slots == 4
    bench.check(four, [0, 1, 2, 3])


def test_a_load_that_fails_keeps_no_numbers(bench, monkeypatch):
    """There are only so many buffers for them on the device."""
    bench = bench(rows=1)
    fetch = bench.loads.begin(SCATTERED)

    def refuse(*copy):
        raise RuntimeError("refused")

    monkeypatch.setattr(bench.kernel, "from_rows", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        bench.loads.place(fetch, list(range(len(SCATTERED))), signal=False)
    assert bench.kernel.uploaded == 0


def test_neighbours_are_one_copy(bench, monkeypatch):
    monkeypatch.setattr(bulk_loads, "_STEP_TURNS", 1)
    bench = bench(rows=4)
    bench.loads.place(bench.loads.begin(RUN, whole=True), list(range(len(RUN))), signal=False)
    assert len([c for c in bench.commands if c != "turn"]) < len(RUN)


def test_the_last_layers_of_neighbours_come_by_the_copy_engine_too(bench):
    bench = bench(rows=3)
    bench.loads.place(bench.loads.begin(RUN), list(range(len(RUN))), signal=False)
    assert not bench.kernel.read_slots
    assert sum(bench.commands) == len(RUN) * bench.layout.block_bytes
    bench.loads.place(bench.loads.begin(SCATTERED), list(range(len(SCATTERED))), signal=False)
    assert bench.kernel.read_slots == len(SCATTERED)


def test_without_room_for_a_block_there_is_nothing_to_gain(bench):
    assert bench(rows=1).loads.can_take()
    tight = bench(rows=1)
    tight.loads._size = tight.layout.block_bytes - 1
    assert not tight.loads.can_take()


def mixed(device, blocks, heads=2):
    return [torch.empty(blocks, 1, width, dtype=torch.uint8, device=device) for width in (64, 64, 3, 64)]


def wide(device, blocks, heads=2):
    return [torch.empty(blocks, 16, width, dtype=torch.uint8, device=device) for width in (64, 64, 24, 64)]


@pytest.mark.parametrize(("layout", "taken"), [(mixed, False), (wide, True)])
def test_rows_are_as_aligned_as_the_kernels_words(layout, taken, monkeypatch):
    monkeypatch.setattr(bulk_loads.torch, "cuda", FAKES)
    assert Bench(layout, 3, 2, monkeypatch).loads.can_take() is taken
