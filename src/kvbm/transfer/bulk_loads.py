"""Long loads: the copy engine fetches slots into staging buffers, and a kernel scatters them to the engine's blocks.

A kernel that reads pinned memory requests 128 bytes at a time and gets 51 GB/s from a bus that carries 55. The copy
engine gets 55, but needs large pieces and costs the CPU 0.8 µs for each. A slot holds its layers side by side, so many
layers form one piece. The copy engine fetches these pieces into staging buffers on the device, and a kernel scatters
each buffer to the engine's blocks at the speed of device memory. Meanwhile the engine computes the layers that have
arrived. The fewer layers are left when the last bytes arrive, the better.

For neighbouring slots one copy fetches the same layers of all slots. Half of the layers come first, then half of the
rest, and so on down to the last one. Example: 728 blocks of an 8B model with five buffers::

    slots (host)             buffers (device)        blocks (device)
    [0-17 | 18-26 | .. |35]  ->  buffer 0  ->  layers 0 to 17 of blocks 0-363
    [0-17 | 18-26 | .. |35]  ->  buffer 1  ->  layers 0 to 17 of blocks 364-727
    [     | 18-26 |       ]  ->  buffer 2  ->  layers 18 to 26 of all blocks
    ...
    [             | .. |35]  ->  buffer 1  ->  layer 35 of all blocks

For scattered slots, or too many runs, the copy engine fetches all layers but the last eighth at once, and the kernel
alone brings the rest, layer by layer. The engine then begins to compute late. If a step has many tokens to compute, the
kernel alone, which brings the layers in order from the start, is faster.

A load that no step computes on yet (*whole*) fetches all layers at once. This suits decoding requests: the copy engine
takes no multiprocessor, and the scattering kernel ends within a fraction of a millisecond. A kernel that reads the bus
would occupy a few multiprocessors for the whole load.

The engine's own small inputs use the same copy engine and would queue behind the load. So the load lets other streams
in now and then (:mod:`~kvbm.transfer.relay`): every 0.3 ms in a load that no step waits for (*gently*), and at least a
dozen times in the first half of a load that a step waits for. By then the step has its inputs.

A load can begin before the engine has allocated the blocks (*prefetch*): the copy engine fills the buffers, and the
kernel scatters them once the blocks are known. More buffers keep the bus busy for longer. The engine's own thread
submits everything, in a millisecond or two for a prompt of 32k tokens. A separate thread would wait for the
interpreter, 5 ms each time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kvbm.tracing import annotate
from kvbm.transfer.base import Slab
from kvbm.transfer.cuda_calls import BatchCopy, copy_rows
from kvbm.transfer.kernel_copies import KernelCopies
from kvbm.transfer.kernels import WIDEST_WORD
from kvbm.transfer.layout import SLOT_ALIGNMENT, BlockLayout
from kvbm.transfer.relay import Relay

# 7 ms of the bus: large enough for few copies, which take little CPU, and small enough for a short last scatter.
_BUFFER_BYTES = 384 << 20
_MIN_RUN = 4  # average slots per run from which slots are copied as runs
_GENTLE_BYTES = 16 << 20  # between two hand-overs of the copy engine
_STEP_TURNS = 12  # hand-overs in the first half of a load that a step waits for; the step's inputs need about six
_MAX_COPIES = 512  # of a load by layer: 2 ms of CPU time


class Portion(NamedTuple):
    """The content of one buffer: some layers of some slots."""

    first: int  # segment
    last: int
    offset: int  # of the first segment in a slot
    row: int  # bytes of a slot
    start: int  # of the load's slots
    end: int


class Fetch:
    """Slots that the copy engine fetches. Until their blocks are known it fills the free buffers only.

    It fetches slots in the order of the slab, not in that of the request, because neighbours are one copy.
    """

    def __init__(self, slots: Sequence[int], gently: bool, piece_slots: int) -> None:
        """``piece_slots``: slots that are pinned together; one copy must not cross two such pieces."""
        self.slots = slots
        self.gently = gently  # other requests decode meanwhile
        places = np.asarray(slots, np.int64)
        self.order = np.argsort(places, kind="stable")
        self.sorted = places[self.order]
        apart = (np.diff(self.sorted, prepend=-2) != 1) | (self.sorted % piece_slots == 0)
        self._breaks: list[int] = np.flatnonzero(apart).tolist()  # where a new copy must begin
        self.portions: list[Portion] = []
        self.begun = 0  # portions

    @property
    def at_a_time(self) -> int:
        """Bytes of the next portion between two hand-overs of the copy engine; 0: no hand-over is needed."""
        if self.gently:
            return _GENTLE_BYTES
        if self.begun >= len(self.portions) / 2:
            return 0
        total = sum((portion.end - portion.start) * portion.row for portion in self.portions)
        return total // (2 * _STEP_TURNS)

    def runs(self, start: int, end: int) -> list[int] | None:
        """Where runs of neighbours begin between ``start`` and ``end``; None if the runs are too short."""
        inside = self._breaks[bisect_right(self._breaks, start) : bisect_left(self._breaks, end)]
        return [start, *inside] if end - start >= _MIN_RUN * (1 + len(inside)) else None

    def add(self, layers: Layers, room: int) -> None:
        """Add portions for these layers of all slots. ``room``: bytes of a buffer."""
        rows = room // layers.row
        for start in range(0, len(self.sorted), rows):
            self.portions.append(Portion(*layers, start, min(start + rows, len(self.sorted))))


class BulkLoads:
    """Runs one load at a time, or one load and the prefetch of the next. For the engine's thread only."""

    def __init__(
        self, layout: BlockLayout, slab: Slab, device: torch.device, stream: torch.cuda.Stream,
        kernel: KernelCopies, memory: torch.Tensor, batch: BatchCopy,
    ) -> None:  # fmt: skip
        self._slab = slab
        self._batch = batch
        self._stream = stream
        self._relay = Relay(device, stream.priority)
        self._kernel = kernel
        self._layers = layers_of(layout)
        self._all = merge_layers(self._layers)
        sizes = {segment.slot_size for segment in layout.segments}
        self._aligned = len(sizes) == 1 or all(size % WIDEST_WORD == 0 for size in sizes)
        self._memory = memory
        buffers = max(2, memory.numel() // _BUFFER_BYTES)  # the copy engine fills one while the kernel empties another
        self._size = memory.numel() // buffers // SLOT_ALIGNMENT * SLOT_ALIGNMENT  # as aligned as slots are
        self._buffers = [memory.data_ptr() + i * self._size for i in range(buffers)]
        self._fetched = [torch.cuda.Event() for _ in self._buffers]
        self._emptied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0  # the buffer that is filled next
        self._layers_read = torch.cuda.Event()  # the kernel has read the layers of the load before

    def can_take(self) -> bool:
        """Whether the layout suits bulk loads: several layers, a block fits a buffer, and rows are aligned like slots.
        An unaligned access would end the engine."""
        return len(self._layers) > 1 and self._all.row <= self._size and self._aligned

    def begin(self, slots: Sequence[int], whole: bool = False, gently: bool = False) -> Fetch:
        """Start to fill the buffers. A fetch that is never placed is overwritten by a later one."""
        fetch = Fetch(slots, gently, self._slab.piece_slots)
        for layers in self._groups(fetch, whole):
            fetch.add(layers, self._size)
        self._relay.stream.wait_event(self._layers_read)
        with annotate("copier.fetch"):
            for _ in self._buffers:
                self._fetch(fetch)
        return fetch

    def _groups(self, fetch: Fetch, whole: bool) -> list[Layers]:
        """Groups of layers that are fetched together, in the order in which the engine needs them."""
        if whole:
            return [self._all]
        runs = fetch.runs(0, len(fetch.sorted))
        groups = _MAX_COPIES // len(runs) if runs is not None else 0
        if groups < 2:
            return [merge_layers(self._layers[: -max(1, len(self._layers) // 8)])]
        return in_halves(self._layers, groups)

    def place(self, fetch: Fetch, blocks: Sequence[int], signal: bool) -> None:
        """Fetch the remaining portions and scatter all of them to the engine's blocks, on the load stream.

        ``signal``: count the layers that have arrived.
        """
        kernel, stream, turn = self._kernel, self._stream, self._turn - fetch.begun
        targets = np.asarray(blocks, np.int64)[fetch.order]
        indices = kernel.upload(targets)
        try:
            for i, (first, last, offset, row, start, end) in enumerate(fetch.portions, turn):
                buffer = i % len(self._buffers)
                stream.wait_event(self._fetched[buffer])
                address = self._buffers[buffer] - offset
                kernel.from_rows(indices, start, end, address, row, first, last, signal, fetch.gently)
                self._emptied[buffer].record(stream)
                self._fetch(fetch)
        finally:
            kernel.release(indices)
        if fetch.portions[-1].last < self._all.last:
            kernel.to_device(fetch.sorted, targets, first=fetch.portions[-1].last, signal=signal)
            self.yield_bus_to_kernel()

    def yield_bus_to_kernel(self) -> None:
        """Make the next fetch wait until the kernel has read the layers of this load. A step waits for them, and beside
        the copy engine the kernel gets little of the bus."""
        self._layers_read.record(self._stream)

    def wait(self) -> None:
        """Wait until no fetch reads host memory, including fetches that were dropped."""
        self._relay.wait()

    def _fetch(self, fetch: Fetch) -> None:
        """Fill the next buffer with the next portion, if one is left."""
        if fetch.begun == len(fetch.portions):
            return
        portion = fetch.portions[fetch.begun]
        buffer = self._turn % len(self._buffers)
        self._relay.stream.wait_event(self._emptied[buffer])
        self._copy(fetch, portion, self._buffers[buffer])
        self._fetched[buffer].record(self._relay.stream)
        self._turn += 1
        fetch.begun += 1

    def _copy(self, fetch: Fetch, portion: Portion, target: int) -> None:
        pitch, row, first, last = self._slab.slot_bytes, portion.row, portion.start, portion.end
        source = self._slab.address + portion.offset
        at_a_time = fetch.at_a_time
        turns = range(first, last, max(1, at_a_time // row)) if at_a_time else (first,)
        pauses = {*turns[1:], last} if at_a_time else set()
        runs = fetch.runs(first, last)
        starts = turns if runs is None else sorted({*runs, *turns})
        for start, end in pairwise([*starts, last]):
            if runs is None:
                targets = target + np.arange(start - first, end - first, dtype=np.int64) * row
                self._batch(targets, source + fetch.sorted[start:end] * pitch, row, self._relay.stream)
            else:
                slot, rows = int(fetch.sorted[start]), end - start
                copy_rows(
                    target + (start - first) * row, row, source + slot * pitch, pitch, row, rows, self._relay.stream
                )
            if end in pauses:
                self._relay.hand_over()


class Layers(NamedTuple):
    """Neighbouring segments of a slot."""

    first: int
    last: int
    offset: int
    row: int  # bytes


def layers_of(layout: BlockLayout) -> list[Layers]:
    """The segments of each layer."""
    ends = [i for i, segment in enumerate(layout.segments) if i and segment.layer != layout.segments[i - 1].layer]
    cuts = pairwise([0, *ends, len(layout.segments)])
    sizes = [segment.slot_size for segment in layout.segments]
    return [Layers(first, last, layout.segments[first].offset, sum(sizes[first:last])) for first, last in cuts]


def merge_layers(layers: Sequence[Layers]) -> Layers:
    return Layers(layers[0].first, layers[-1].last, layers[0].offset, sum(layer.row for layer in layers))


def in_halves(layers: Sequence[Layers], groups: int) -> list[Layers]:
    """Half of the layers, half of the rest, and so on, in at most ``groups`` groups. While the bus brings one group,
    the engine computes the group before; when the last group arrives, all others have been computed."""
    halves: list[Layers] = []
    while len(layers) > 1 and len(halves) < groups - 1:
        half = -(-len(layers) // 2)
        halves.append(merge_layers(layers[:half]))
        layers = layers[half:]
    return [*halves, merge_layers(layers)]
