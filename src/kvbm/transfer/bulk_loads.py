"""Long loads: the copy engine fetches, a kernel puts into place.

A kernel that reads pinned memory asks for 128 bytes at a time and gets 51 GB/s out of a bus that carries 55. The copy
engine gets 55, but wants large pieces and costs the CPU 0.8 µs for each. A slot keeps its layers side by side, so many
layers are one piece of it: the copy engine fetches those, slot by slot, into buffers on the device, and a kernel
scatters each buffer to the engine's blocks at the speed of device memory. Meanwhile the engine computes the layers that
are there, so what counts is how little is left to compute when the last bytes arrive.

Slots that are neighbours need not be fetched one by one: the same layers of all of them are one copy, whatever their
number. Half of the layers come first, then half of the rest, and so on down to the last one. Of 728 blocks of an 8B
model, with five buffers::

    slots (host)             buffers (device)        blocks (device)
    [0-17 | 18-26 | .. |35]  ->  buffer 0  ->  layers 0 to 17 of blocks 0-363
    [0-17 | 18-26 | .. |35]  ->  buffer 1  ->  layers 0 to 17 of blocks 364-727
    [     | 18-26 |       ]  ->  buffer 2  ->  layers 18 to 26 of all blocks
    ...
    [             | .. |35]  ->  buffer 1  ->  layer 35 of all blocks

Slots that lie apart, or in too many runs, come with all layers but the last eighth of them at once, and the kernel
alone brings the rest, one layer after the other. So the engine begins to compute late. Where it has more to compute
than fits behind the last layers, the kernel alone, which brings layer after layer from the start, is the better way.

A load that nobody computes on yet (*whole*) comes with all layers at once. Beside requests that decode this is the
gentle way: the copy engine takes no multiprocessor, and the scattering kernel is over in a fraction of a millisecond,
while a kernel that reads the bus would sit on a few multiprocessors all the time, which others count on.

But the engine's own little inputs come by the same copy engine, and would come when the load is over: those of the
steps of others, and those of the step that waits for the load itself, which should compute meanwhile. So now and then
others have their turn (:mod:`~kvbm.transfer.relay`): in a load that no step waits for (*gently*) every 0.3 ms, in one
that a step waits for a dozen times or more while the first half of its portions comes. By then the step has its inputs.

It can begin before the engine has made room for the blocks (*prefetch*): the buffers are filled, and what is in them is
scattered once the blocks are known. The more there are of them, the longer the bus stays busy while the engine is not
ready. Everything is submitted to streams from the engine's own thread, in a millisecond or two for a prompt of 32k
tokens: a thread would have to fight the engine for the interpreter, five milliseconds a round.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kvbm.tiers.host.slab import HostSlab
from kvbm.tracing import annotate
from kvbm.transfer.cuda_calls import BatchCopy, copy_rows
from kvbm.transfer.kernel_copies import KernelCopies
from kvbm.transfer.kernels import WIDEST_WORD
from kvbm.transfer.layout import SLOT_ALIGNMENT, BlockLayout
from kvbm.transfer.relay import Relay

# 7 ms of the bus: large enough to be few, which costs little CPU, small enough for the last to be scattered soon.
_BUFFER_BYTES = 384 << 20
_LONG_RUN = 4  # slots in a row on average, from which they are copied as runs
_GENTLE_BYTES = 16 << 20  # after which others have their turn
_STEP_TURNS = 12  # that a step's inputs have in the first half of its load; they take some six of them
_COPIES = 512  # that a load by layer may be made of: 2 ms of the CPU


class Portion(NamedTuple):
    """What one buffer takes: some layers of some slots."""

    first: int  # segment
    last: int
    offset: int  # of the first segment in a slot
    row: int  # bytes of a slot
    start: int  # of the load's slots
    end: int


class Fetch:
    """Slots on their way to the buffers; as far as there are buffers, until their blocks are known.

    They come in the order in which they lie in the slab, not in that of the request: neighbours are one copy.
    """

    def __init__(self, slots: Sequence[int], gently: bool, piece_slots: int) -> None:
        """``piece_slots``: how many of them are pinned together."""
        self.slots = slots
        self.gently = gently  # others decode meanwhile
        places = np.asarray(slots, np.int64)
        self.order = np.argsort(places, kind="stable")
        self.sorted = places[self.order]
        apart = (np.diff(self.sorted, prepend=-2) != 1) | (self.sorted % piece_slots == 0)
        self._breaks: list[int] = np.flatnonzero(apart).tolist()  # where a single copy must begin anew
        self.portions: list[Portion] = []
        self.begun = 0  # portions

    @property
    def at_a_time(self) -> int:
        """Bytes of the next portion after which others have their turn; 0: they need none any more."""
        if self.gently:
            return _GENTLE_BYTES
        if self.begun >= len(self.portions) / 2:
            return 0
        total = sum((portion.end - portion.start) * portion.row for portion in self.portions)
        return total // (2 * _STEP_TURNS)

    def runs(self, start: int, end: int) -> list[int] | None:
        """Where in this stretch runs of neighbours begin. None: so often that they are not copied as such."""
        inside = self._breaks[bisect_right(self._breaks, start) : bisect_left(self._breaks, end)]
        return [start, *inside] if end - start >= _LONG_RUN * (1 + len(inside)) else None

    def add(self, layers: Layers, room: int) -> None:
        """These layers of all slots, as many of them at a time as there is room for."""
        rows = room // layers.row
        for start in range(0, len(self.sorted), rows):
            self.portions.append(Portion(*layers, start, min(start + rows, len(self.sorted))))


class BulkLoads:
    """One load at a time, or one load and the prefetch of the next. Called from the engine's thread only."""

    def __init__(
        self, layout: BlockLayout, slab: HostSlab, device: torch.device, stream: torch.cuda.Stream,
        kernel: KernelCopies, memory: torch.Tensor, batch: BatchCopy,
    ) -> None:  # fmt: skip
        self._slab = slab
        self._batch = batch
        self._stream = stream
        self._relay = Relay(device, stream.priority)
        self._kernel = kernel
        self._layers = layers_of(layout)
        self._all = merge_layers(self._layers)
        sizes = {segment.size for segment in layout.segments}
        self._aligned = len(sizes) == 1 or all(size % WIDEST_WORD == 0 for size in sizes)
        self._memory = memory
        buffers = max(2, memory.numel() // _BUFFER_BYTES)  # one is being filled while another is being emptied
        self._size = memory.numel() // buffers // SLOT_ALIGNMENT * SLOT_ALIGNMENT  # as aligned as slots are
        self._buffers = [memory.data_ptr() + i * self._size for i in range(buffers)]
        self._fetched = [torch.cuda.Event() for _ in self._buffers]
        self._emptied = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0  # the buffer that is filled next
        self._layers_read = torch.cuda.Event()  # by the kernel, of the load before

    def can_take(self) -> bool:
        """Whether there is more than one layer, a block fits a buffer, and a buffer's rows are as aligned as slots are.
        An access that is not aligned would be the end of the engine."""
        return len(self._layers) > 1 and self._all.row <= self._size and self._aligned

    def begin(self, slots: Sequence[int], whole: bool = False, gently: bool = False) -> Fetch:
        """Start to fill the buffers. What is not wanted after all, and never placed, is filled over in its turn."""
        fetch = Fetch(slots, gently, self._slab.piece_slots)
        for layers in self._groups(fetch, whole):
            fetch.add(layers, self._size)
        self._relay.stream.wait_event(self._layers_read)
        with annotate("copier.fetch"):
            for _ in self._buffers:
                self._fetch(fetch)
        return fetch

    def _groups(self, fetch: Fetch, whole: bool) -> list[Layers]:
        """Layers that are fetched together, in the order in which the engine wants them."""
        if whole:
            return [self._all]
        runs = fetch.runs(0, len(fetch.sorted))
        groups = _COPIES // len(runs) if runs is not None else 0
        if groups < 2:
            return [merge_layers(self._layers[: -max(1, len(self._layers) // 8)])]
        return in_halves(self._layers, groups)

    def place(self, fetch: Fetch, blocks: Sequence[int], signal: bool) -> None:
        """Put what is fetched, and all the rest, into the engine's blocks. On the stream of loads.

        ``signal``: count the layers that have arrived.
        """
        kernel, stream, turn = self._kernel, self._stream, self._turn - fetch.begun
        targets = np.asarray(blocks, np.int64)[fetch.order]
        indices = kernel.upload(targets)
        try:
            for i, (first, last, offset, row, start, end) in enumerate(fetch.portions, turn):
                buffer = i % len(self._buffers)
                stream.wait_event(self._fetched[buffer])
                kernel.from_rows(indices, start, end, self._buffers[buffer] - offset, row, first, last, signal)
                self._emptied[buffer].record(stream)
                self._fetch(fetch)
        finally:
            kernel.release(indices)
        if fetch.portions[-1].last < self._all.last:
            kernel.to_device(fetch.sorted, targets, first=fetch.portions[-1].last, signal=signal)
            self.come_after_layers()

    def come_after_layers(self) -> None:
        """Fetch nothing more before the kernel has read the layers of this load, for which a step waits: beside the
        copy engine it would get little of the bus."""
        self._layers_read.record(self._stream)

    def wait(self) -> None:
        """Until nothing reads host memory any more, wanted or not."""
        self._relay.wait()

    def _fetch(self, fetch: Fetch) -> None:
        """Fill the next buffer with the next portion, if there is one left."""
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
    """Segments that lie side by side in a slot."""

    first: int
    last: int
    offset: int
    row: int  # bytes


def layers_of(layout: BlockLayout) -> list[Layers]:
    """Each layer for itself."""
    ends = [i for i, segment in enumerate(layout.segments) if i and segment.layer != layout.segments[i - 1].layer]
    cuts = pairwise([0, *ends, len(layout.segments)])
    sizes = [segment.size for segment in layout.segments]
    return [Layers(first, last, layout.segments[first].offset, sum(sizes[first:last])) for first, last in cuts]


def merge_layers(layers: Sequence[Layers]) -> Layers:
    return Layers(layers[0].first, layers[-1].last, layers[0].offset, sum(layer.row for layer in layers))


def in_halves(layers: Sequence[Layers], groups: int) -> list[Layers]:
    """Half of the layers, half of the rest, and so on, in so many groups at most: while the bus brings one of them the
    engine computes the one before, and when the last is there all others have been computed."""
    halves: list[Layers] = []
    while len(layers) > 1 and len(halves) < groups - 1:
        half = -(-len(layers) // 2)
        halves.append(merge_layers(layers[:half]))
        layers = layers[half:]
    return [*halves, merge_layers(layers)]
