"""Loads and stores on a GPU that runs its streams in any order it may, over many histories by chance.

The copier's own code, on streams that are queues. Nothing is carried out when it is submitted: a scheduler picks one
stream after the other at random, and whatever is at the head of it, if it need not wait, moves its bytes then. So the
order is no better than what events and counts make of it. Every layer is compared when the engine's turn to compute it
has come, every block when its load says that it is over, every slot when its store does. Some loads fail while they are
being submitted: the engine computes their blocks itself then, and nothing of them may come later.

Memory is a dict from addresses to words of eight bytes: who leaves it raises.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kvbm.transfer import bulk_loads, cuda, engine_copies, kernel_copies  # noqa: E402
from kvbm.transfer.base import When  # noqa: E402
from kvbm.transfer.layout import TensorSpec, describe  # noqa: E402

BLOCKS, SLOTS, LAYERS = 16, 24, 5
WORD = 8
FAULTS = (0.02, 0.1, 0.4)  # chances that a copy for a load is refused
SLAB, BUFFERS, ARRIVED, CACHE = 1 << 40, 2 << 20, 3 << 20, 1 << 24  # addresses; the first is a wide one


class Gpu:
    """Streams, and what runs them."""

    def __init__(self, seed):
        self.source = random.Random(seed)
        self.memory = {}
        self.streams = []
        self.current = []
        self.turn = None

    def stream(self):
        self.streams.append(Stream(self))
        return self.streams[-1]

    def step(self):
        """False: no stream can go on."""
        ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
        if not ready:
            return False
        # Now one stream for long, now all by turns: either shows what the other does not.
        if self.turn not in ready or self.source.random() < 0.1:
            self.turn = self.source.choice(ready)
        self.turn.queue.pop(0)[1]()
        return True

    def run(self, steps):
        while steps > 0 and self.step():
            steps -= 1

    def run_until(self, over):
        while not over():
            assert self.step(), "they wait for each other"

    def copy(self, target, source, size):
        for at in range(0, size, WORD):
            assert target + at in self.memory, "memory that nobody has"
            self.memory[target + at] = self.memory[source + at]


class Stream:
    priority = 0

    def __init__(self, gpu):
        self.gpu, self.queue = gpu, []

    def submit(self, work, ready=lambda: True):
        self.queue.append((ready, work))

    def wait_event(self, event):
        count = event.recorded
        self.submit(lambda: None, lambda: event.reached >= count)

    def synchronize(self):
        self.gpu.run_until(lambda: not self.queue)


class Event:
    gpu = None

    def __init__(self, enable_timing=False):
        self.recorded = self.reached = 0  # how often

    def record(self, stream=None):
        self.recorded += 1
        count = self.recorded

        def reach():
            self.reached = max(self.reached, count)

        (stream or self.gpu.current[-1]).submit(reach)

    def query(self):
        return self.reached >= self.recorded

    def synchronize(self):
        self.gpu.run_until(self.query)

    def elapsed_time(self, other):
        return 1.0


class Arrived:
    """The counts of layers."""

    def __init__(self, gpu, layers):
        self.gpu, self.counts = gpu, [0] * layers

    def data_ptr(self):
        return ARRIVED

    def copy_(self, counts):
        self.gpu.current[-1].submit(lambda: self.counts.__setitem__(slice(None), counts.tolist()))


class Kernels:
    """What the two kernels do, piece by piece, in any order."""

    def __init__(self, gpu):
        self.gpu, self.pinned = gpu, {}

    def copy_numbers(self, target, source, count, _tile):
        stream = self.gpu.current[-1]
        stream.submit(lambda: target[:count].copy_(self.pinned[source][:count]))

    def copy_pieces(
        self, table, pairs, arrived, slots_at, blocks_at, host, pitch, first, segments, count, _word, words, _tile,
        to_device, signal,
    ):  # fmt: skip
        def move(segment, pair):
            address, stride, offset, layer = table[segment]
            device = address + int(pairs[blocks_at + pair]) * stride
            slot = host + int(pairs[slots_at + pair]) * pitch + offset
            source, target = (slot, device) if to_device else (device, slot)
            self.gpu.copy(target, source, words * WORD)
            arrived.counts[layer] += signal

        pieces = [(first + piece // count, piece % count) for piece in range(segments * count)]
        self.gpu.source.shuffle(pieces)
        stream = self.gpu.current[-1]
        for segment, pair in pieces:
            stream.submit(lambda segment=segment, pair=pair: move(segment, pair))


class Compiled:
    """A kernel as Triton starts it: the first call of a kind compiles it, and returns what was compiled. That takes
    arguments of this kind only, and does not look."""

    def __init__(self, kernel, constants, kind=None):
        self.kernel, self.constants, self.kind = kernel, constants, kind

    def __getitem__(self, grid):
        return self.run

    def run(self, *arguments, num_warps=None):
        numbers = [argument for argument in arguments[: -self.constants] if isinstance(argument, int)]
        kind = [*(number.bit_length() > 31 for number in numbers), *arguments[-self.constants :]]
        assert self.kind in (None, kind)
        self.kernel(*arguments)
        return Compiled(self.kernel, self.constants, kind)


class Issued:
    """Set by the thread that issues stores, which runs when somebody waits for it, or by chance."""

    pump = None

    def __init__(self):
        self.is_set_now = False

    def set(self):
        self.is_set_now = True

    def is_set(self):
        return self.is_set_now

    def wait(self):
        if not self.is_set_now:
            type(self).pump()
        assert self.is_set_now


class History:
    def __init__(self, seed, patch, fault=0.0):
        """``fault``: the chance of a copy for a load to be refused."""
        self.gpu = gpu = Gpu(seed)
        self.source = source = gpu.source
        self.engine = gpu.stream()
        gpu.current.append(self.engine)
        kernels = Kernels(gpu)

        @contextmanager
        def on(stream):
            gpu.current.append(stream)
            try:
                yield
            finally:
                gpu.current.pop()

        patch.setattr(Event, "gpu", gpu)
        patch.setattr(Issued, "pump", staticmethod(self.issue))
        patch.setattr(
            torch, "cuda", SimpleNamespace(
                Stream=lambda device, priority: gpu.stream(), Event=Event, stream=on,
                current_stream=lambda device=None: gpu.current[-1], set_device=lambda device: None,
            ),
        )  # fmt: skip

        def unpinned(*shape, pin_memory=False, **options):
            made = torch.zeros(*shape, **options)
            if pin_memory and made.dim() == 2:
                kernels.pinned.update((row.data_ptr(), row) for row in made)
            return made

        patch.setattr(
            kernel_copies, "torch",
            SimpleNamespace(tensor=torch.tensor, zeros=unpinned, empty=unpinned, cuda=torch.cuda,
                            int64=torch.int64, int32=torch.int32, uint8=torch.uint8),
        )  # fmt: skip
        patch.setattr(kernel_copies, "_BUFFERS", source.choice((5, 20)))
        patch.setattr(kernel_copies, "_BATCH", source.choice((3, 64)))
        patch.setattr(kernel_copies, "copy_pieces", Compiled(kernels.copy_pieces, constants=5))
        patch.setattr(kernel_copies, "copy_numbers", Compiled(kernels.copy_numbers, constants=1))
        self.layout = self.make_layout()
        row = self.layout.block_bytes
        piece = source.choice((3, 7, SLOTS))
        slab = SimpleNamespace(address=SLAB, slot_bytes=row, slots=SLOTS, piece_slots=piece, close=self.close_slab)
        buffers, size = source.choice(((2, row), (2, 2 * row), (3, 3 * row), (2, 20 * row)))
        patch.setattr(bulk_loads, "SLOT_ALIGNMENT", WORD)
        patch.setattr(bulk_loads, "_BUFFER_BYTES", size)
        patch.setattr(bulk_loads, "_GENTLE_BYTES", source.choice((1, 2, 5)) * row)
        patch.setattr(bulk_loads, "_STEP_TURNS", source.choice((1, 3, 12)))
        patch.setattr(bulk_loads, "_MAX_COPIES", source.choice((0, 4, 8, 512)))
        patch.setattr(bulk_loads, "_MIN_RUN", source.choice((1, 2, 4)))
        patch.setattr(bulk_loads, "copy_rows", self.copy_rows)
        patch.setattr(cuda, "wait_until", self.wait_until)
        patch.setattr(engine_copies, "threading", SimpleNamespace(
            Event=Issued, Thread=lambda target, **_: SimpleNamespace(start=lambda: None, join=target)))  # fmt: skip
        patch.setattr(engine_copies, "_MAX_CALL_PIECES", source.choice((1, 3, 100)))
        self.copier = copier = object.__new__(cuda.CudaCopier)
        copier._layout, copier._slab, copier.device = self.layout, slab, None
        copier._layer_index = {name: i for i, name in enumerate(self.layout.layers)}
        copier.load_stream, copier._store_stream, copier.engine_stream = gpu.stream(), gpu.stream(), self.engine
        copier.kernel = kernel_copies.KernelCopies(self.layout, slab, "cpu")
        copier.kernel._table = copier.kernel._table.tolist()
        self.arrived = copier.kernel.arrived = Arrived(gpu, LAYERS)
        copier._engine = None
        if source.random() < 0.7:
            copier._engine = engine_copies.EngineCopies(self.layout, slab, None, 0, self.batch)
        gpu.memory.update(dict.fromkeys(range(BUFFERS, BUFFERS + buffers * size, WORD)))
        memory = SimpleNamespace(numel=lambda: buffers * size, data_ptr=lambda: BUFFERS)
        copier._bulk = bulk_loads.BulkLoads(
            self.layout, slab, None, copier.load_stream, copier.kernel, memory, self.batch
        )
        assert copier._bulk.can_take()
        assert len(copier._bulk._buffers) == buffers
        copier._bulk_blocks = source.choice((1, 4))
        copier._step_began, copier._forward_ended = Event(), Event()
        copier._expected = [0] * LAYERS
        copier._prefetched, copier._open = None, []
        # What everybody goes by who submits: the version that is, or will be, in each place.
        self.versions = 0
        self.blocks, self.slots = {}, {}
        for block in range(BLOCKS):
            self.write(block, range(len(self.layout.segments)), self.new_version(self.blocks, block))
        for slot in range(SLOTS):
            version = self.new_version(self.slots, slot)
            for i, segment in enumerate(self.layout.segments):
                for at in range(0, segment.size, WORD):
                    gpu.memory[SLAB + slot * row + segment.offset + at] = (version, i, at)
        self.readers = dict.fromkeys(range(SLOTS), 0)  # loads and prefetches of each slot
        self.fetched = None
        self.loads, self.stores = [], []
        self.compared = self.failed = 0
        self.fault, self.for_load = fault, False

    def make_layout(self):
        """Two segments a layer, some of two words."""
        wide = WORD * self.source.choice((1, 2))
        tensors = []
        for i in range(LAYERS):
            size = wide if i == 1 else WORD
            address = CACHE + i * (1 << 20)
            tensors.append(
                TensorSpec(f"layer{i}", address, (2, BLOCKS, size), (4096 * BLOCKS, 4096, 1), 1, "torch.uint8")
            )
        return describe(tensors, BLOCKS)

    # -- what CUDA does ------------------------------------------------------------------------------------------------

    @contextmanager
    def loading(self, loads=True):
        """Copies for a load may be refused."""
        before, self.for_load = self.for_load, loads
        try:
            yield
        finally:
            self.for_load = before

    def refuse(self):
        if self.for_load and self.source.random() < self.fault:
            self.failed += 1
            raise RuntimeError("refused")

    def batch(self, targets, sources, sizes, stream):
        self.refuse()
        each = sizes.tolist() if hasattr(sizes, "tolist") else [sizes] * len(targets)
        for target, source, size in zip(targets.tolist(), sources.tolist(), each, strict=True):
            stream.submit(lambda t=target, s=source, n=size: self.gpu.copy(t, s, n))

    def copy_rows(self, target, target_pitch, source, source_pitch, size, rows, stream):
        self.refuse()
        for i in range(rows):
            stream.submit(lambda i=i: self.gpu.copy(target + i * target_pitch, source + i * source_pitch, size))

    def wait_until(self, stream, address, count):
        layer = (address - ARRIVED) // 4
        stream.submit(lambda: None, lambda: self.arrived.counts[layer] >= count)

    def issue(self):
        """What the thread does that issues stores."""
        if self.copier._engine is not None:
            self.copier._engine._jobs.put(None)
            with self.loading(False):
                self.copier._engine._run()

    def close_slab(self):
        for address in [address for address in self.gpu.memory if address < BUFFERS]:
            del self.gpu.memory[address]

    # -- contents ------------------------------------------------------------------------------------------------------

    def new_version(self, places, place):
        self.versions += 1
        places[place] = self.versions
        return self.versions

    def write(self, block, segments, version):
        for i in segments:
            segment = self.layout.segments[i]
            for at in range(0, segment.size, WORD):
                self.gpu.memory[segment.address + block * segment.stride + at] = (version, i, at)

    def compare(self, address, segments, version):
        """``address``: of each segment."""
        for i in segments:
            for at in range(0, self.layout.segments[i].size, WORD):
                assert self.gpu.memory[address(self.layout.segments[i]) + at] == (version, i, at)
        self.compared += 1

    def compare_block(self, block, version, layer=None):
        chosen = [i for i, s in enumerate(self.layout.segments) if layer is None or s.layer == layer]
        self.compare(lambda segment: segment.address + block * segment.stride, chosen, version)

    # -- what an engine does -------------------------------------------------------------------------------------------

    def some_slots(self, most):
        """Of those that hold something: neighbours, or any."""
        there = [slot for slot in self.slots if self.slots[slot] is not None]
        count = self.source.randrange(1, min(most, len(there)) + 1)
        if self.source.random() < 0.6:
            start = self.source.randrange(len(there) - count + 1)
            return there[start : start + count]
        return self.source.sample(there, count)

    def free_blocks(self):
        """That no load is bringing."""
        loading = {block for load in self.loads for block in load.blocks}
        return [block for block in range(BLOCKS) if block not in loading]

    def reading(self, blocks):
        """Stores that may still read these."""
        return [store.ticket for store in self.stores if not set(store.blocks).isdisjoint(blocks)]

    def load(self, when, free):
        """Into some of the free blocks. None: it has failed."""
        fetched, self.fetched = self.fetched, None
        if fetched is not None:
            for slot in fetched:
                self.readers[slot] -= 1
        if fetched is not None and len(fetched) <= len(free) and self.source.random() < 0.7:
            slots = list(fetched)
        else:
            slots = self.some_slots(min(10, len(free)))
        blocks = self.source.sample(free, len(slots))
        tokens = self.source.choice((1, 1, 10_000))
        try:
            with self.loading():
                ticket = self.copier.load(slots, blocks, self.reading(blocks), when, tokens)
        except RuntimeError:
            self.blocks.update(dict.fromkeys(blocks))
            return None
        for slot in slots:
            self.readers[slot] += 1
        versions = [self.slots[slot] for slot in slots]
        load = SimpleNamespace(ticket=ticket, blocks=blocks, slots=slots, versions=versions, later=when is When.LATER)
        self.loads.append(load)
        if not load.later:
            self.blocks.update(zip(blocks, versions, strict=True))
        return load

    def step(self):
        free = self.free_blocks()
        self.source.shuffle(free)
        for_loads = free[: len(free) // 2]
        mine = free[len(free) // 2 :]
        written = self.source.sample(mine, self.source.randrange(len(mine) + 1))
        self.copier.begin_step(self.reading(written))
        loads = []
        for _ in range(self.source.choice((0, 1, 1, 2))):
            if for_loads:
                load = self.load(self.source.choice(list(When)), for_loads)
                if load is not None:
                    for_loads = [block for block in for_loads if block not in load.blocks]
                    loads.append(load)
                self.wander()
        read = [block for load in loads if not load.later for block in load.blocks]
        read += self.source.sample(mine, self.source.randrange(len(mine) + 1))
        read = [block for block in read if self.blocks[block] is not None]
        before = {block: self.blocks[block] for block in read}
        after = {block: self.new_version(self.blocks, block) for block in written}
        for layer, name in enumerate(self.layout.layers):
            self.copier.wait_layer(name)
            chosen = [i for i, segment in enumerate(self.layout.segments) if segment.layer == layer]
            for block in read:
                self.engine.submit(lambda b=block, n=layer: self.compare_block(b, before[b], n))
            for block in written:
                self.engine.submit(lambda b=block, c=chosen: self.write(b, c, after[b]))
            if self.source.random() < 0.3:
                self.wander()
        assert all(self.copier.end_load(load.ticket) for load in loads)
        good = sorted({*read, *written})
        for _ in range(self.source.choice((0, 1, 2))):
            self.store(self.source.sample(good, min(len(good), self.source.randrange(1, 6))))

    def store(self, blocks):
        idle = [slot for slot in self.slots if not self.readers[slot] and self.slots[slot] is not None]
        if not blocks or len(idle) < len(blocks) + SLOTS // 2:
            return
        slots = self.source.sample(idle, len(blocks))
        ticket = self.copier.store(blocks, slots)
        for slot in slots:
            self.slots[slot] = None
        versions = [self.blocks[block] for block in blocks]
        self.stores.append(SimpleNamespace(ticket=ticket, blocks=blocks, slots=slots, versions=versions))

    def prefetch(self):
        if self.fetched is None:
            slots = self.some_slots(12)
            try:
                with self.loading():
                    begun = self.copier.prefetch(slots, 1)
            except RuntimeError:
                return
            if begun:
                self.fetched = list(slots)
                for slot in slots:
                    self.readers[slot] += 1

    def end_prefetch(self):
        self.copier.end_prefetch()
        if self.fetched is not None:
            for slot in self.fetched:
                self.readers[slot] -= 1
            self.fetched = None

    def load_later(self):
        free = self.free_blocks()
        if free:
            self.copier.begin_load()
            self.load(When.LATER, free)

    def look(self):
        """What is over?"""
        for load in [load for load in self.loads if load.ticket.done()]:
            self.loads.remove(load)
            for block, slot, version in zip(load.blocks, load.slots, load.versions, strict=True):
                self.readers[slot] -= 1
                if load.later:
                    self.compare_block(block, version)
                    self.blocks[block] = version
        for store in [store for store in self.stores if store.ticket.done()]:
            self.stores.remove(store)
            assert not store.ticket.bad
            for slot, version in zip(store.slots, store.versions, strict=True):
                at = SLAB + slot * self.layout.block_bytes
                self.compare(lambda s, at=at: at + s.offset, range(len(self.layout.segments)), version)
                self.slots[slot] = version

    def wander(self):
        """The GPU goes on for a while."""
        self.gpu.run(self.source.choice((0, 0, 5, 50, 500)))

    def run(self, turns):
        what = [self.step, self.step, self.load_later, self.prefetch, self.prefetch, self.end_prefetch, self.look]
        for _ in range(turns):
            self.source.choice(what)()
            if self.source.random() < 0.2:
                self.issue()
            self.wander()
        closes = self.source.random() < 0.5
        if closes:
            self.step()
            self.copier.close()
        else:
            self.end_prefetch()
            self.issue()
        self.gpu.run_until(lambda: not any(stream.queue for stream in self.gpu.streams))
        if not closes:
            self.look()
            assert not self.loads
            assert not self.stores
            assert not any(self.readers.values())


def run_ten(kind, first, turns=12, faults=(0.0,)):
    """The comparisons and the refused copies of ten histories."""
    compared = failed = 0
    for seed in range(first, first + 10):
        with pytest.MonkeyPatch.context() as patch:
            history = kind(seed, patch, faults[seed % len(faults)])
            history.run(turns)
            compared += history.compared
            failed += history.failed
    return compared, failed


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_whatever_order_the_gpu_keeps_every_byte_is_there_in_time(first):
    assert run_ten(History, first)[0] > 100


@pytest.mark.parametrize("first", range(100, 160, 10))
def test_of_a_load_that_has_failed_nothing_comes_later(first):
    assert run_ten(History, first, 20, FAULTS)[1]


def test_nobody_waits_for_ever_for_a_store_of_which_not_even_an_event_could_be_had(monkeypatch):
    history = History(1, monkeypatch)
    copies = engine_copies.EngineCopies(history.layout, history.copier._slab, None, 0, lambda *pieces: None)

    def fail(event):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(copies._relay.stream, "wait_event", fail, raising=False)
    tickets = [copies.store([1, 2], [3, 4], history.engine) for _ in range(2)]
    copies.close()
    for ticket in tickets:
        ticket.wait()
        ticket.hold(history.engine)
        assert ticket.done()
        assert (list(ticket.bad), ticket.reason) == ([0, 1], "RuntimeError: CUDA error")


def test_stores_change_streams_after_every_call(monkeypatch):
    """So that the engine's own copies have their turn."""
    history = History(1, monkeypatch)
    streams = []
    copies = engine_copies.EngineCopies(
        history.layout, history.copier._slab, None, 0, lambda *pieces: streams.append(pieces[-1])
    )
    monkeypatch.setattr(engine_copies, "_MAX_CALL_PIECES", 3)
    copies.store([1, 2], [3, 4], history.engine)
    copies.close()
    assert len(streams) > 3
    assert all(this is not after for this, after in pairwise(streams))
