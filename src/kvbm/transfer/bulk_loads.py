"""Long loads: the copy engine fetches, a kernel puts into place.

A kernel that reads pinned memory asks for 128 bytes at a time and gets 51 GB/s out of a bus that carries 55. The copy
engine gets 54, but wants large pieces and costs the CPU 0.8 µs for each. A slot keeps its layers side by side, so all
layers but the last few are one piece of it: the copy engine fetches those, slot by slot, into buffers on the
device, and a kernel scatters each buffer to the engine's blocks at the speed of device memory. The last layers come by
the kernel alone, one after the other, while the engine computes the layers before them::

    slots (host)           buffers (device)        blocks (device)
    [layers 0-31 | 32-35]  ->  buffer 0  ->  layers 0 to 31 of blocks 0-119
    [layers 0-31 | 32-35]  ->  buffer 1  ->  layers 0 to 31 of blocks 120-239
    ...
    [            | 32-35]         ->         layer 32, 33, 34, 35 of all blocks

So the engine begins to compute late. Where it has more to compute than fits behind the last layers, the kernel alone,
which brings layer after layer from the start, is the better way.

A load that nobody computes on yet (*whole*) has all layers in its front. Beside requests that decode this is the gentle
way: the copy engine takes no multiprocessor, and the scattering kernel is over in a fraction of a millisecond, while a
kernel that reads the bus would sit on a few multiprocessors all the time, which others count on. But the copy engine
stays with a stream for as long as there is something to copy, and every step of the engine sends its own little inputs
the same way: behind copies of 8 ms, a buffer's worth, a step that takes 6 ms took 45. So there (*gently*) a little
kernel comes after every half a millisecond's worth: it gives the stream something else to do, and others their turn.

It can begin before the engine has made room for the blocks (*prefetch*): the buffers are filled, and what is in them is
scattered once the blocks are known. The more there are of them, the longer the bus stays busy while the engine is not
ready. Everything is submitted to streams from the engine's own thread, in a millisecond or two for a prompt of 32k
tokens: a thread would have to fight the engine for the interpreter, five milliseconds a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvbm.observe.nvtx import annotate
from kvbm.storage.host import HostSlab
from kvbm.storage.layout import SLOT_ALIGNMENT, BlockLayout
from kvbm.transfer.cuda_calls import BatchCopy, copy_rows
from kvbm.transfer.kernel_copies import KernelCopies
from kvbm.transfer.kernels import WIDEST_WORD

_BUFFER_BYTES = (
    384 << 20
)  # 7 ms of the bus: few enough to cost little CPU, small enough for the last to be scattered soon
_LONG_RUN = 4  # slots in a row on average, from which they are copied as runs
_GENTLE_BYTES = 32 << 20  # after which others have their turn


class Fetch:
    """Slots on their way to the buffers; as far as there are buffers, until their blocks are known.

    They come in the order in which they lie in the slab, not in that of the request: neighbours are one copy.
    """

    def __init__(self, slots: Sequence[int], segments: int, row: int, rows: int, gently: bool) -> None:
        self.slots = slots
        self.segments = segments  # of a slot's front
        self.row = row  # bytes of it
        self.rows = rows  # that a buffer takes
        self.gently = gently  # with gaps for others
        places = np.asarray(slots, np.int64)
        self.order = np.argsort(places, kind="stable")
        self.sorted = places[self.order]
        self.begun = 0  # buffers' worth


class BulkLoads:
    """One load at a time, or one load and the prefetch of the next. Called from the engine's thread only."""

    def __init__(
        self, layout: BlockLayout, slab: HostSlab, device: torch.device, stream: torch.cuda.Stream,
        kernel: KernelCopies, memory: torch.Tensor, batch: BatchCopy,
    ) -> None:  # fmt: skip
        self._slab = slab
        self._batch = batch
        self._stream = stream
        self._fetch_stream = torch.cuda.Stream(device, priority=stream.priority)
        self._kernel = kernel
        self._front = front(layout)
        self._all = (len(layout.segments), layout.block_bytes)
        sizes = {segment.size for segment in layout.segments}
        self._aligned = len(sizes) == 1 or all(size % WIDEST_WORD == 0 for size in sizes)
        self._nothing = torch.zeros(1, dtype=torch.uint8, device=device)
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
        return self._front[0] > 0 and self._all[1] <= self._size and self._aligned

    def begin(self, slots: Sequence[int], whole: bool = False, gently: bool = False) -> Fetch:
        """Start to fill the buffers. :meth:`place` or :meth:`drop` must follow before the next one begins."""
        segments, row = self._all if whole else self._front
        fetch = Fetch(slots, segments, row, self._size // row, gently)
        self._fetch_stream.wait_event(self._layers_read)
        with annotate("copier.fetch"):
            for _ in self._buffers:
                self._fetch(fetch)
        return fetch

    def place(self, fetch: Fetch, blocks: Sequence[int], signal: bool) -> None:
        """Put what is fetched, and all the rest, into the engine's blocks. On the stream of loads.

        ``signal``: count the layers that have arrived.
        """
        kernel, stream, first = self._kernel, self._stream, self._turn - fetch.begun
        targets = np.asarray(blocks, np.int64)[fetch.order]
        indices = kernel.upload(targets)
        for i, start in enumerate(range(0, len(targets), fetch.rows)):
            end = min(start + fetch.rows, len(targets))
            buffer = (first + i) % len(self._buffers)
            stream.wait_event(self._fetched[buffer])
            kernel.from_rows(indices, start, end, self._buffers[buffer], fetch.row, fetch.segments, signal)
            self._emptied[buffer].record(stream)
            self._fetch(fetch)
        kernel.release(indices)
        if fetch.segments < self._all[0]:
            kernel.to_device(fetch.sorted, targets, first=fetch.segments, signal=signal)
            self.come_after_layers()

    def come_after_layers(self) -> None:
        """Fetch nothing more before the kernel has read the layers of this load, for which a step waits: beside the
        copy engine it would get little of the bus."""
        self._layers_read.record(self._stream)

    def drop(self, fetch: Fetch) -> None:
        """What was fetched is not wanted after all."""
        for turn in range(self._turn - fetch.begun, self._turn):
            self._emptied[turn % len(self._buffers)].record(self._fetch_stream)

    def _fetch(self, fetch: Fetch) -> None:
        """Fill the next buffer with the next slots, if there are any left."""
        slots = fetch.sorted[fetch.begun * fetch.rows : (fetch.begun + 1) * fetch.rows]
        if not len(slots):
            return
        buffer = self._turn % len(self._buffers)
        self._fetch_stream.wait_event(self._emptied[buffer])
        self._copy(slots, self._buffers[buffer], fetch.row, fetch.gently)
        self._fetched[buffer].record(self._fetch_stream)
        self._turn += 1
        fetch.begun += 1

    def _copy(self, slots: np.ndarray, target: int, row: int, gently: bool) -> None:
        pitch, stream = self._slab.slot_bytes, self._fetch_stream
        starts = np.flatnonzero((np.diff(slots, prepend=-2) != 1) | (slots % self._slab.piece_slots == 0))
        turns = np.arange(0, len(slots), max(1, _GENTLE_BYTES // row) if gently else len(slots))
        scattered = len(slots) < _LONG_RUN * len(starts)
        starts = turns if scattered else np.union1d(starts, turns)
        ends = np.append(starts[1:], len(slots))
        for start, end, slot in zip(starts.tolist(), ends.tolist(), slots[starts].tolist(), strict=True):
            if scattered:
                targets = target + np.arange(start, end, dtype=np.int64) * row
                self._batch(targets, self._slab.address + slots[start:end] * pitch, row, stream)
            else:
                copy_rows(target + start * row, row, self._slab.address + slot * pitch, pitch, row, end - start, stream)
            if gently:
                self._let_others_in()

    def _let_others_in(self) -> None:
        with torch.cuda.stream(self._fetch_stream):
            self._nothing.zero_()


def front(layout: BlockLayout) -> tuple[int, int]:
    """(segments, bytes) of a slot's front: all layers but the last eighth. Nothing where there is only one layer."""
    layers = len(layout.layers)
    split = sum(segment.layer < layers - max(1, layers // 8) for segment in layout.segments)
    return split, layout.segments[split].offset if split else 0
